// The specs that the grammar allows; of those with a stored global scale some.
#pragma once

#include <string>
#include <vector>

#include "quire/base/check.h"
#include "quire/spec/quant_spec.h"

namespace quire::testing {

/// Every spec of the grammar: all combinations of one word out of each list after a family; those that are refused are
/// left out, and those with the option `given`, which need a scale with the call (test_given_scale.cpp).
inline std::vector<QuantSpec> all_specs() {
  using Words = std::vector<std::string>;
  const auto expand = [](const std::string& family, const std::vector<Words>& lists) {
    Words texts{family};
    for (const Words& list : lists) {
      Words longer;
      for (const std::string& text : texts)
        for (const std::string& word : list) longer.push_back(word.empty() ? text : text + ":" + word);
      texts = longer;
    }
    return texts;
  };
  Words texts;
  const auto add = [&](const Words& more) { texts.insert(texts.end(), more.begin(), more.end()); };
  const Words nan{"", "nan"}, e5m2{"", "e5m2"}, pow2{"", "pow2"}, eps{"", "eps=0.5"}, order{"", "interleaved"},
      scale_order{"", "swizzled", "interleaved"};
  add(expand("fp8_tensor", {e5m2, pow2, eps, nan, order}));
  add(expand("fp8_row", {e5m2, pow2, eps, nan, order}));
  add(expand("fp8_block", {e5m2, {"", "128x128"}, pow2, eps, nan, order}));
  add(expand("mxfp8", {e5m2, {"", "32x32"}, nan, scale_order}));
  add(expand("mxfp4", {nan, scale_order}));
  add(expand("nvfp4", {{"", "16x16"},
                       {"", "row_scaled"},
                       {"", "rht", "rht=unsigned"},
                       {"", "sr"},
                       {"", "4over6=mae", "4over6=mse"},
                       {"", "256"},
                       nan,
                       scale_order}));
  // A stored global scale changes only how one number is made of another: not with every order of codes.
  const Words global{"global=mul", "global=div"};
  add(expand("nvfp4",
             {global, {"", "16x16"}, {"", "row_scaled"}, {"", "rht"}, {"", "sr"}, {"", "4over6=mae"}, {"", "256"}}));
  add(expand("nvfp4", {global, {"nan:swizzled", "nan:interleaved"}}));
  std::vector<QuantSpec> specs;
  for (const std::string& text : texts) try {
      specs.push_back(QuantSpec::parse(text));
    } catch (const Error&) {
      // Not a legal combination.
    }
  return specs;
}

/// Those of codes in plain order, which is what kernels of quantizers, norms and activations write.
inline std::vector<QuantSpec> plain_specs() {
  std::vector<QuantSpec> specs = all_specs();
  std::erase_if(specs, [](const QuantSpec& spec) { return spec.interleaved; });
  return specs;
}

}  // namespace quire::testing
