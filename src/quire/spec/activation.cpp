#include "quire/spec/activation.h"

#include <charconv>
#include <cmath>

#include "quire/base/check.h"
#include "quire/base/float_mode.h"

namespace quire {
namespace {

struct Parameter {
  std::string_view name;
  float Activation::* member;
};
constexpr std::array<Parameter, 3> kParameters{
    {{"limit", &Activation::limit}, {"alpha", &Activation::alpha}, {"glu_linear_offset", &Activation::offset}}};

std::string activation_names() {
  std::string names;
  for (const ActivationRow& row : kActivations) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

Activation named(std::string_view text, std::string_view name) {
  for (size_t i = 0; i < kActivations.size(); ++i)
    if (kActivations[i].name == name) return {.kind = static_cast<uint8_t>(i), .alpha = kActivations[i].alpha};
  fail("activation: '", text, "' names no activation; use one of ", activation_names());
}

bool read_number(std::string_view digits, float& to) {
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, to);
  return error == std::errc() && stop == end && std::isfinite(to);
}

void read_parameter(Activation& a, std::string_view part, std::string_view text) {
  const size_t equals = std::min(part.find('='), part.size());
  for (const Parameter& p : kParameters)
    if (a.row().clamped && p.name == part.substr(0, equals) &&
        read_number(part.substr(std::min(equals + 1, part.size())), a.*p.member))
      return;
  fail("activation: '", part, "' in '", text, "' is no parameter of ", a.row().name, ", which takes ",
       a.row().clamped ? "limit=F, alpha=F and glu_linear_offset=F with finite numbers F" : "none");
}

}  // namespace

std::string activation_table() {
  std::string out;
  for (const ActivationRow& row : kActivations) {
    out += text(row.name, " ", row.inputs());
    for (const Parameter& p : kParameters)
      if (row.clamped) out += text(" ", p.name);
    out += "\n";
  }
  return out;
}

Activation Activation::parse(std::string_view text) {
  const FloatMode mode;
  size_t begin = std::min(text.find(':'), text.size());
  Activation a = named(text, text.substr(0, begin));
  while (begin < text.size()) {
    const size_t end = std::min(text.find(':', ++begin), text.size());
    read_parameter(a, text.substr(begin, end - begin), text);
    begin = end;
  }
  check(a.limit >= 0, "activation: limit in '", text, "' must not be negative");
  return a;
}

std::string Activation::to_string() const {
  const FloatMode mode;
  const Activation defaults = named(row().name, row().name);
  std::string out(row().name);
  for (const Parameter& p : kParameters) {
    if (this->*p.member == defaults.*p.member) continue;
    char digits[32];
    const auto result = std::to_chars(digits, digits + sizeof digits, this->*p.member);
    out += ":" + std::string(p.name) + "=" + std::string(digits, result.ptr);
  }
  return out;
}

}  // namespace quire
