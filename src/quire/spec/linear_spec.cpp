#include "quire/spec/linear_spec.h"

#include <array>

#include "quire/base/check.h"

namespace quire {
namespace {

constexpr std::array<std::string_view, 3> kRoles{"x", "w", "dy"};
constexpr std::array<QuantSpec LinearSpec::*, 3> kMembers{&LinearSpec::x, &LinearSpec::w, &LinearSpec::dy};

void check_roles(const LinearSpec& s, std::string_view text) {
  for (size_t i = 0; i < 2; ++i)
    check(!(s.*kMembers[i]).stochastic, "recipe: '", text, "' rounds ", kRoles[i],
          " stochastically, but only dy may be; remove 'sr' from ", kRoles[i]);
  check(s.w.hadamard == Hadamard::off, "recipe: '", text,
        "' transforms w, but only the operands of dw (x and dy) may be; remove 'rht' from w");
  check(s.x.hadamard == s.dy.hadamard, "recipe: '", text, "' transforms x and dy differently, so that the transform ",
        "would not cancel in dw; give both the same 'rht' option or none");
}

}  // namespace

LinearSpec LinearSpec::parse(std::string_view text) {
  LinearSpec out;
  std::string_view rest = text;
  for (size_t i = 0; i < kRoles.size(); ++i) {
    const size_t end = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, end);
    const std::string_view role = kRoles[i];
    check(part.size() > role.size() && part.substr(0, role.size()) == role && part[role.size()] == '=',
          "recipe: expected '", role, "=SPEC' but found '", part, "' in '", text, "'; write x=SPEC,w=SPEC,dy=SPEC");
    out.*kMembers[i] = QuantSpec::parse(part.substr(role.size() + 1));
    const bool last = i + 1 == kRoles.size();
    rest.remove_prefix(last ? end : std::min(end + 1, rest.size()));
  }
  check(rest.empty(), "recipe: unexpected '", rest, "' at the end of '", text, "'; write x=SPEC,w=SPEC,dy=SPEC");
  check_roles(out, text);
  return out;
}

std::string LinearSpec::to_string() const {
  return text("x=", x.to_string(), ",w=", w.to_string(), ",dy=", dy.to_string());
}

}  // namespace quire
