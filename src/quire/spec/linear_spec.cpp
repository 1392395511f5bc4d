#include "quire/spec/linear_spec.h"

#include <array>
#include <utility>

#include "quire/base/check.h"

namespace quire {
namespace {

constexpr std::array<std::string_view, 3> kRoles{"x", "w", "dy"};
constexpr std::array<QuantSpec LinearSpec::*, 3> kMembers{&LinearSpec::x, &LinearSpec::w, &LinearSpec::dy};
constexpr std::string_view kForm = "write x=SPEC,w=SPEC,dy=SPEC[,dx=SPEC][,backward=WORD][,kernels=WORD]";

/// In place of the specs of x and dy.
constexpr std::string_view kNone = "none";

/// The words of Backward; its first one is what no word means.
constexpr std::array<std::pair<std::string_view, Backward>, 3> kBackward{
    {{"requantized", Backward::requantized},
     {"dequantized", Backward::dequantized},
     {"high_precision", Backward::high_precision}}};

/// The name of what says which kernels may be taken, and its one word.
constexpr std::string_view kKernels = "kernels", kBatchInvariant = "batch_invariant";

void check_roles(const LinearSpec& s, std::string_view text) {
  for (size_t i = 0; i < 2; ++i)
    check(!(s.*kMembers[i]).stochastic, "recipe: '", text, "' rounds ", kRoles[i],
          " stochastically, but only dy may be; remove 'sr' from ", kRoles[i]);
  check(s.w.hadamard == Hadamard::off, "recipe: '", text,
        "' transforms w, but only the operands of dw (x and dy) may be; remove 'rht' from w");
  check(s.x.hadamard == s.dy.hadamard, "recipe: '", text, "' transforms x and dy differently, so that the transform ",
        "would not cancel in dw; give both the same 'rht' option or none");
  for (const QuantSpec* other : {&s.w, &s.dy, s.dx ? &*s.dx : &s.dy})
    check(!other->given, "recipe: '", text, "' gives another operand than x a scale from the caller; remove 'given' ",
          "from ", other->to_string());
  check(!s.dx || (!s.dx->stochastic && s.dx->hadamard == Hadamard::off), "recipe: '", text,
        "' rounds dx stochastically or transforms it, which nothing would undo; remove 'sr' and 'rht' from dx");
}

void check_weight_only(const LinearSpec& s, std::string_view text) {
  check(!s.dx, "recipe: '", text, "' rounds dx, which nothing quantizes under x=none; leave dx out");
  check(s.backward == Backward::dequantized || s.backward == Backward::high_precision, "recipe: '", text,
        "' has another backward than x=none has, dequantized (the default) or high_precision");
}

/// Takes "NAME=VALUE" up to the next comma off the front of `rest`; empty if another name stands there.
std::string_view take(std::string_view& rest, std::string_view name) {
  const size_t end = std::min(rest.find(','), rest.size());
  const std::string_view part = rest.substr(0, end);
  if (part.size() <= name.size() + 1 || part.substr(0, name.size()) != name || part[name.size()] != '=') return {};
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return part.substr(name.size() + 1);
}

Backward parse_backward(std::string_view word, std::string_view text) {
  for (const auto& [name, value] : kBackward)
    if (name == word) return value;
  fail("recipe: unknown backward '", word, "' in '", text,
       "'; it is requantized, dequantized or high_precision, or left out");
}

}  // namespace

std::string_view to_string(Backward backward) {
  for (const auto& [name, value] : kBackward)
    if (value == backward) return name;
  return {};
}

InputSpec InputSpec::parse(std::string_view text) {
  return text == kNone ? InputSpec{} : InputSpec{QuantSpec::parse(text)};
}

std::string InputSpec::to_string() const { return has_value() ? (*this)->to_string() : std::string(kNone); }

LinearSpec LinearSpec::parse(std::string_view text) {
  LinearSpec out;
  std::string_view rest = text;
  for (size_t i = 0; i < kRoles.size(); ++i) {
    const std::string_view found = rest.substr(0, std::min(rest.find(','), rest.size()));
    const std::string_view spec = take(rest, kRoles[i]);
    check(!spec.empty(), "recipe: expected '", kRoles[i], "=SPEC' but found '", found, "' in '", text, "'; ", kForm);
    const bool none = spec == kNone;
    check(!none || i != 1, "recipe: '", text, "' does not quantize w; leave the recipe out, or give w a spec");
    if (i == 0) out.weight_only = none;
    check(i != 2 || none == out.weight_only, "recipe: '", text,
          "' quantizes one of x and dy only; give both a spec, or ", "both none");
    if (!none) out.*kMembers[i] = QuantSpec::parse(spec);
  }
  if (out.weight_only) out.backward = Backward::dequantized;
  if (const std::string_view spec = take(rest, "dx"); !spec.empty()) out.dx = QuantSpec::parse(spec);
  if (const std::string_view word = take(rest, "backward"); !word.empty()) out.backward = parse_backward(word, text);
  if (const std::string_view word = take(rest, kKernels); !word.empty()) {
    check(word == kBatchInvariant, "recipe: unknown kernels '", word, "' in '", text, "'; the word is ",
          kBatchInvariant, ", or left out");
    out.batch_invariant = true;
  }
  check(text.back() != ',', "recipe: '", text, "' ends with a comma; ", kForm);
  check(rest.empty(), "recipe: unexpected '", rest, "' at the end of '", text, "'; ", kForm);
  check_roles(out, text);
  if (out.weight_only) check_weight_only(out, text);
  if (out.batch_invariant && !out.weight_only) check_tokens_alone(out.x, quire::text("recipe: '", text, "'"));
  return out;
}

std::string LinearSpec::to_string() const {
  const auto operand = [&](const QuantSpec& spec) { return weight_only ? InputSpec{} : InputSpec{spec}; };
  std::string s = text("x=", operand(x).to_string(), ",w=", w.to_string(), ",dy=", operand(dy).to_string());
  if (dx) s += ",dx=" + dx->to_string();
  if (const std::string_view word = quire::to_string(backward); !word.empty()) s += text(",backward=", word);
  if (batch_invariant) s += text(",", kKernels, "=", kBatchInvariant);
  return s;
}

void check_tokens_alone(const QuantSpec& x, std::string_view where, bool static_scale) {
  const bool of_tensor = x.row().scope == Scope::tensor || (x.row().scale == ScaleKind::two_level && !x.row_scaled);
  check(
      static_scale || x.given || !of_tensor, where, " quantizes x with one scale for all tokens, so that the bits of ",
      "a token depend on its batch, and kernels=batch_invariant (quire.batch_invariant) forbids that; give x a scale ",
      "for each token (fp8_row, nvfp4:row_scaled; as a recipe NVFP4BlockScaling(disable_rht=True, "
      "row_scaled_activation=True)), scales of blocks (mxfp8, mxfp4, fp8_block), or a static scale ",
      "from quire.calibrate (the option 'given' of a recipe, input_scale of a runner)");
  check(!x.square, where, " gives tiles of several tokens of x one scale, and kernels=batch_invariant ",
        "(quire.batch_invariant) forbids that; remove the size of tiles from x");
}

OptionalLinearSpec OptionalLinearSpec::parse(std::string_view text) {
  OptionalLinearSpec out;
  if (text == quire::text(kKernels, "=", kBatchInvariant)) {
    out.batch_invariant = true;
  } else if (!text.empty()) {
    out.emplace(LinearSpec::parse(text));
    out.batch_invariant = out->batch_invariant;
  }
  return out;
}

}  // namespace quire
