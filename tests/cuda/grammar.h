// Every text of the grammar of docs/specs.md, with one value of the option eps.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "quire/base/check.h"
#include "quire/spec/quant_spec.h"

namespace quire::testing {

/// Each canonical text once, in order.
inline std::vector<std::string> whole_grammar() {
  using Words = std::vector<std::string>;
  const Words e5m2{"", "e5m2"}, pow2{"", "pow2"}, eps{"", "eps=0.125"}, given{"", "given"}, nan{"", "nan"},
      order{"", "swizzled", "interleaved"};
  const std::vector<std::pair<std::string, std::vector<Words>>> families{
      {"fp8_tensor", {e5m2, pow2, eps, given}},
      {"fp8_row", {e5m2, pow2, eps}},
      {"fp8_block", {e5m2, {"", "128x128"}, pow2, eps}},
      {"mxfp8", {e5m2, {"", "32x32"}}},
      {"mxfp4", {}},
      {"nvfp4",
       {{"", "16x16"},
        {"", "row_scaled"},
        {"", "rht", "rht=unsigned"},
        {"", "sr"},
        {"", "4over6=mae", "4over6=mse"},
        {"", "256"},
        {"", "global=mul", "global=div"},
        given}}};
  std::set<std::string> legal;
  for (auto [family, options] : families) {
    options.insert(options.end(), {nan, order});
    Words texts{family};
    for (const Words& option : options) {
      Words longer;
      for (const std::string& text : texts)
        for (const std::string& word : option) longer.push_back(word.empty() ? text : text + ":" + word);
      texts = longer;
    }
    for (const std::string& text : texts) try {
        legal.insert(QuantSpec::parse(text).to_string());
      } catch (const Error&) {
        // Not a legal combination.
      }
  }
  return {legal.begin(), legal.end()};
}

}  // namespace quire::testing
