#include "quire/spec/quant_spec.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "quire/base/check.h"
#include "quire/base/float_mode.h"

namespace quire {
namespace {

constexpr unsigned bit(Family f) { return family_bits({f}); }
constexpr unsigned kFp8F32 = family_bits({Family::fp8_tensor, Family::fp8_row, Family::fp8_block});
constexpr unsigned kByteScales = family_bits({Family::mxfp8, Family::mxfp4, Family::nvfp4});
constexpr unsigned kNvfp4 = bit(Family::nvfp4);
constexpr unsigned kAll = kFp8F32 | kByteScales;

/// One row of the grammar. `read` applies the text after `name` ("" for a plain word) and returns false if it is wrong;
/// `write` gives that text back, or "-" when the option has its default.
struct Option {
  std::string_view name;
  std::string_view form;
  std::string_view meaning;
  unsigned families;
  bool (*read)(QuantSpec&, std::string_view value);
  std::string (*write)(const QuantSpec&);
};

constexpr std::string_view kDefault = "-";
std::string word(bool set) { return set ? "" : std::string(kDefault); }

template <auto Member>
bool set_flag(QuantSpec& s, std::string_view value) {
  s.*Member = true;
  return value.empty();
}
template <auto Member>
std::string flag(const QuantSpec& s) {
  return word(s.*Member);
}

template <Format F>
bool read_element(QuantSpec& s, std::string_view value) {
  s.element = F;
  return value.empty();
}
template <Format F>
std::string write_element(const QuantSpec& s) {
  return word(s.element == F);
}

bool read_epsilon(QuantSpec& s, std::string_view value) {
  if (value.size() < 2 || value[0] != '=') return false;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data() + 1, end, s.epsilon);
  return error == std::errc() && stop == end && std::isfinite(s.epsilon) && s.epsilon >= 0;
}
std::string write_epsilon(const QuantSpec& s) {
  if (s.epsilon == 0) return std::string(kDefault);
  char digits[32];
  const auto result = std::to_chars(digits, digits + sizeof digits, s.epsilon);
  return "=" + std::string(digits, result.ptr);
}

bool read_hadamard(QuantSpec& s, std::string_view value) {
  s.hadamard = value.empty() ? Hadamard::signs : Hadamard::no_signs;
  return value.empty() || value == "=unsigned";
}
std::string write_hadamard(const QuantSpec& s) {
  if (s.hadamard == Hadamard::off) return std::string(kDefault);
  return s.hadamard == Hadamard::signs ? "" : "=unsigned";
}

bool read_four_over_six(QuantSpec& s, std::string_view value) {
  s.four_over_six = value == "=mse" ? FourOverSix::mse : FourOverSix::mae;
  return value == "=mae" || value == "=mse";
}
std::string write_four_over_six(const QuantSpec& s) {
  if (s.four_over_six == FourOverSix::off) return std::string(kDefault);
  return s.four_over_six == FourOverSix::mae ? "=mae" : "=mse";
}

bool read_global(QuantSpec& s, std::string_view value) {
  s.global = value == "=div" ? Global::divisor : Global::multiplier;
  return value == "=mul" || value == "=div";
}
std::string write_global(const QuantSpec& s) {
  if (s.global == Global::amax) return std::string(kDefault);
  return s.global == Global::multiplier ? "=mul" : "=div";
}

constexpr auto kSquare = &QuantSpec::square;

constexpr size_t kElementWords = kElementOptions.size();

template <size_t I>
constexpr Option element_option() {
  constexpr ElementOption option = kElementOptions[I];
  constexpr std::string_view name = row(option.element).name;
  return {name, name, option.meaning, option.families, read_element<option.element>, write_element<option.element>};
}

/// The other options. One that several families spell differently (the square block) has a row for each.
constexpr std::array kOtherOptions = std::to_array<Option>({
    {"128x128", "128x128", "one scale per 128x128 tile instead of 1x128", bit(Family::fp8_block), set_flag<kSquare>,
     flag<kSquare>},
    {"32x32", "32x32", "one scale per 32x32 tile instead of 1x32", bit(Family::mxfp8), set_flag<kSquare>,
     flag<kSquare>},
    {"16x16", "16x16", "one scale per 16x16 tile instead of 1x16", kNvfp4, set_flag<kSquare>, flag<kSquare>},
    {"pow2", "pow2", "scales are rounded up to powers of two", kFp8F32, set_flag<&QuantSpec::pow2>,
     flag<&QuantSpec::pow2>},
    {"eps", "eps=F", "amax is at least F, a finite number of at least 0", kFp8F32, read_epsilon, write_epsilon},
    {"row_scaled", "row_scaled", "one global amax per row (columnwise: per column)", kNvfp4,
     set_flag<&QuantSpec::row_scaled>, flag<&QuantSpec::row_scaled>},
    {"rht", "rht or rht=unsigned",
     "random Hadamard transform of 16 tokens before columnwise quantization; unsigned: without the random signs",
     kNvfp4, read_hadamard, write_hadamard},
    {"sr", "sr", "stochastic rounding of elements", kNvfp4, set_flag<&QuantSpec::stochastic>,
     flag<&QuantSpec::stochastic>},
    {"4over6", "4over6=mae or 4over6=mse",
     "each block has the better of two scales, under which its largest code is 6 or 4; mae: by absolute errors, "
     "mse: by squared errors",
     kNvfp4, read_four_over_six, write_four_over_six},
    {"256", "256", "the largest block scale is 256 instead of 448; needs 4over6", kNvfp4,
     set_flag<&QuantSpec::block_scale_max_256>, flag<&QuantSpec::block_scale_max_256>},
    {"global", "global=mul or global=div",
     "stores a global scale instead of the amax; block scales are multiplied or divided by it", kNvfp4, read_global,
     write_global},
    {"given", "given", "the scale of the tensor is an operand, not measured",
     family_bits({Family::fp8_tensor, Family::nvfp4}), set_flag<&QuantSpec::given>, flag<&QuantSpec::given>},
    {"nan", "nan", "a scale is NaN where its elements hold Inf, or NaN in a format with blocks", kAll,
     set_flag<&QuantSpec::nan>, flag<&QuantSpec::nan>},
    {"swizzled", "swizzled", "scales are padded and stored in tiles of 128x4", kByteScales,
     set_flag<&QuantSpec::swizzled>, flag<&QuantSpec::swizzled>},
    {"interleaved", "interleaved", "codes and one-byte scales are stored in tiles of 16 lines x 4 bytes", kAll,
     set_flag<&QuantSpec::interleaved>, flag<&QuantSpec::interleaved>},
});

/// In canonical order.
constexpr auto kOptions = []<size_t... I>(std::index_sequence<I...>) {
  std::array<Option, kElementWords + kOtherOptions.size()> all{element_option<I>()...};
  std::copy(kOtherOptions.begin(), kOtherOptions.end(), all.begin() + kElementWords);
  return all;
}(std::make_index_sequence<kElementWords>());

std::string family_names() {
  std::string names;
  for (const FamilyRow& f : kFamilies) names += (names.empty() ? "" : ", ") + std::string(f.name);
  return names;
}

std::string options_of(Family family) {
  std::string names;
  for (const Option& o : kOptions)
    if (o.families & bit(family)) names += (names.empty() ? "" : ", ") + std::string(o.form);
  return names;
}

/// The text with the wrong part marked, so that an error points at it.
std::string marked(std::string_view text, size_t begin, size_t length) {
  return quire::text("'", text.substr(0, begin), ">>", text.substr(begin, length), "<<", text.substr(begin + length),
                     "'");
}

Family read_family(std::string_view text, std::string_view name) {
  for (size_t i = 0; i < kFamilies.size(); ++i)
    if (kFamilies[i].name == name) return static_cast<Family>(i);
  fail("spec: unknown family in ", marked(text, 0, name.size()), "; use one of ", family_names());
}

/// Each rule: options that exclude one another, and why.
void check_combination(const QuantSpec& s, std::string_view text) {
  const bool rht = s.hadamard != Hadamard::off, four = s.four_over_six != FourOverSix::off;
  const auto refuse = [&](bool wrong, const char* rule) {
    check(!wrong, "spec: '", text, "' cannot be: ", rule, "; leave one of them out");
  };
  refuse(rht && s.square,
         "a 16x16 tile has one amax for rows and columns, and rht changes the columnwise values only (rht, 16x16)");
  refuse(rht && s.row_scaled, "row_scaled amaxes are those of the untransformed tensor (row_scaled, rht)");
  refuse(s.row_scaled && s.square, "a 16x16 tile would span several global amaxes (row_scaled, 16x16)");
  refuse(s.row_scaled && s.stochastic, "row_scaled is for forward activations, sr for gradients (row_scaled, sr)");
  refuse(four && s.stochastic, "4over6 compares deterministic roundings (4over6, sr)");
  refuse(four && rht, "4over6 is not defined on transformed values (4over6, rht)");
  refuse(s.given && rht, "a static scale is one of the untransformed tensor (given, rht)");
  refuse(s.given && s.row_scaled, "a static scale is one of the whole tensor (given, row_scaled)");
  refuse(s.given && s.pow2, "a static scale is stored as it is, not truncated (given, pow2)");
  refuse(s.given && s.epsilon > 0, "a static scale follows from no amax (given, eps)");
  refuse(s.swizzled && s.interleaved, "scales lie in one order (swizzled, interleaved)");
  check(four || !s.block_scale_max_256, "spec: '", text,
        "' cannot be: 256 is an option of 4over6 (256 without 4over6); ",
        "add 4over6=mae or 4over6=mse, or leave 256 out");
}

}  // namespace

QuantSpec QuantSpec::parse(std::string_view text) {
  const FloatMode mode;
  const size_t first = std::min(text.find(':'), text.size());
  QuantSpec s;
  s.family = read_family(text, text.substr(0, first));
  s.element = s.row().element;
  unsigned seen = 0;
  for (size_t begin = first; begin < text.size();) {
    const size_t end = std::min(text.find(':', ++begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const std::string_view name = part.substr(0, part.find('='));
    const auto wrong = [&](const auto&... why) {
      fail("spec: ", why..., " in ", marked(text, begin, part.size()), "; ", s.row().name,
           " takes: ", options_of(s.family));
    };
    unsigned index = 0;
    for (const Option& o : kOptions) {
      if (o.name == name && (o.families & bit(s.family))) break;
      ++index;
    }
    if (index == kOptions.size()) wrong("unknown option");
    const unsigned excluded = index < kElementWords ? (1u << kElementWords) - 1 : 1u << index;
    if (seen & excluded) wrong(seen >> index & 1 ? "option given twice" : "another element format given before");
    if (!kOptions[index].read(s, part.substr(name.size()))) {
      wrong("expected ", kOptions[index].form, " (", kOptions[index].meaning, ")");
    }
    seen |= 1u << index;
    begin = end;
  }
  check_combination(s, text);
  return s;
}

std::string QuantSpec::to_string() const {
  const FloatMode mode;
  std::string out(row().name);
  for (const Option& o : kOptions) {
    if (!(o.families & bit(family))) continue;
    const std::string value = o.write(*this);
    if (value != kDefault) out += ":" + std::string(o.name) + value;
  }
  return out;
}

std::ostream& operator<<(std::ostream& out, const QuantSpec& s) { return out << s.to_string(); }

std::string spec_grammar() {
  std::string out;
  for (const Option& o : kOptions) {
    std::string families;
    for (size_t i = 0; i < kFamilies.size(); ++i)
      if (o.families >> i & 1) families += (families.empty() ? "" : ", ") + std::string(kFamilies[i].name);
    out += text("| `", o.form, "` | ", families, " | ", o.meaning, " |\n");
  }
  return out;
}

}  // namespace quire
