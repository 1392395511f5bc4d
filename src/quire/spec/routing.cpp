#include "quire/spec/routing.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <variant>

#include "quire/base/check.h"
#include "quire/base/float_mode.h"

namespace quire {
namespace {

constexpr std::array<std::string_view, 3> kFunctions{"softmax", "sigmoid", "sqrtsoftplus"};

struct Option {
  std::string_view name;
  std::variant<bool Routing::*, int64_t Routing::*, float Routing::*> member;
};
constexpr std::array<Option, 7> kOptions{{{"topk", &Routing::topk},
                                          {"after_topk", &Routing::after_topk},
                                          {"renormalize", &Routing::renormalize},
                                          {"num_groups", &Routing::num_groups},
                                          {"group_topk", &Routing::group_topk},
                                          {"group_best", &Routing::group_best},
                                          {"scaling_factor", &Routing::scaling_factor}}};

/// A flag has no digits; a number is nothing but digits.
template <class T>
bool read(std::optional<std::string_view> digits, T& to) {
  if constexpr (std::is_same_v<T, bool>) {
    to = true;
    return !digits;
  } else {
    if (!digits) return false;
    const char* end = digits->data() + digits->size();
    const auto [stop, error] = std::from_chars(digits->data(), end, to);
    return error == std::errc() && stop == end && std::isfinite(static_cast<double>(to)) && to >= T(0);
  }
}

void read_option(Routing& r, std::string_view part, std::string_view text) {
  const size_t equals = part.find('=');
  const std::string_view name = part.substr(0, equals);
  std::optional<std::string_view> digits;
  if (equals != part.npos) digits = part.substr(equals + 1);
  for (const Option& option : kOptions)
    if (option.name == name && std::visit([&](auto member) { return read(digits, r.*member); }, option.member)) return;
  fail("routing: '", part, "' in '", text, "' is no option; use topk=N, after_topk, renormalize, num_groups=N, ",
       "group_topk=N, group_best=N or scaling_factor=F with numbers that are not negative");
}

void check_options(const Routing& r, std::string_view text) {
  check(r.topk > 0, "routing: topk in '", text, "' must be at least 1; write topk=N");
  check(!r.after_topk || r.score == ScoreFunction::softmax, "routing: after_topk in '", text, "' is for softmax, got ",
        name(r.score), ", which scores each expert alone; leave it out");
  check(!r.after_topk || !r.renormalize, "routing: renormalize in '", text,
        "' has nothing to do after after_topk, whose weights have sum 1; leave one of them out");
  check((r.num_groups > 0) == (r.group_topk > 0), "routing: num_groups and group_topk belong together, got '", text,
        "'; pass both or none");
  check(r.group_topk <= r.num_groups, "routing: group_topk in '", text, "' must not exceed num_groups");
  check((r.num_groups > 0) == (r.group_best > 0), "routing: group_best in '", text,
        r.num_groups ? "' would be topk / group_topk = 0; pass group_best=N" : "' is for groups; pass num_groups too");
}

}  // namespace

std::string_view name(ScoreFunction function) { return kFunctions[static_cast<size_t>(function)]; }

Routing Routing::parse(std::string_view text) {
  const FloatMode mode;
  size_t begin = std::min(text.find(':'), text.size());
  const auto found = std::find(kFunctions.begin(), kFunctions.end(), text.substr(0, begin));
  check(found != kFunctions.end(), "routing: '", text, "' begins with no score function; use one of softmax, sigmoid, ",
        "sqrtsoftplus");
  Routing r{.score = static_cast<ScoreFunction>(found - kFunctions.begin())};
  while (begin < text.size()) {
    const size_t end = std::min(text.find(':', ++begin), text.size());
    read_option(r, text.substr(begin, end - begin), text);
    begin = end;
  }
  if (r.group_best == 0 && r.group_topk > 0) r.group_best = r.topk / r.group_topk;
  check_options(r, text);
  return r;
}

std::string Routing::to_string() const {
  const FloatMode mode;
  std::string out(name(score));
  const auto append = [&](std::string_view option, auto value, auto fallback) {
    if (value == fallback) return;
    out += ":" + std::string(option);
    if constexpr (!std::is_same_v<decltype(value), bool>) {
      char digits[32];
      out += "=" + std::string(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
    }
  };
  for (const Option& option : kOptions)
    std::visit([&](auto member) { append(option.name, this->*member, Routing{}.*member); }, option.member);
  return out;
}

}  // namespace quire
