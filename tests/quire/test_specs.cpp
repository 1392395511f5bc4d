// The grammar of specs: what it accepts, what it gives back, and what it says when it refuses.
#include <gtest/gtest.h>

#include <set>

#include "quire/base/check.h"
#include "quire/spec/linear_spec.h"
#include "quire/spec/quant_spec.h"
#include "specs.h"

namespace quire::testing {
namespace {

/// The message with which parsing fails.
template <class Spec>
std::string refusal(std::string_view text) {
  try {
    Spec::parse(text);
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

void expect_contains(const std::string& message, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
}

TEST(Specs, ARecipeCanAskForKernelsWhoseRowsDoNotDependOnTheBatch) {
  for (const std::string text :
       {"x=mxfp8,w=mxfp8,dy=mxfp8", "x=none,w=nvfp4,dy=none,backward=dequantized",
        "x=nvfp4:row_scaled,w=nvfp4:16x16,dy=nvfp4:sr,dx=nvfp4,backward=requantized",
        "x=fp8_tensor:given,w=fp8_tensor,dy=fp8_row", "x=fp8_row,w=fp8_tensor,dy=fp8_tensor"}) {
    const std::string asked = text + ",kernels=batch_invariant";
    EXPECT_FALSE(LinearSpec::parse(text).batch_invariant);
    EXPECT_TRUE(LinearSpec::parse(asked).batch_invariant);
    EXPECT_EQ(LinearSpec::parse(asked).to_string(), asked);
    EXPECT_TRUE(OptionalLinearSpec::parse(asked).batch_invariant);
    EXPECT_EQ(*OptionalLinearSpec::parse(asked), LinearSpec::parse(asked));
  }
  for (const bool asked : {false, true}) {
    const OptionalLinearSpec none = OptionalLinearSpec::parse(asked ? "kernels=batch_invariant" : "");
    EXPECT_FALSE(none.has_value());
    EXPECT_EQ(none.batch_invariant, asked);
  }
}

TEST(Specs, ScalesOfSeveralTokensDoNotGoWithSuchKernels) {
  const auto of_x = [](std::string_view x) {
    return refusal<LinearSpec>(text("x=", x, ",w=mxfp8,dy=mxfp8,kernels=batch_invariant"));
  };
  for (const std::string_view x : {"fp8_tensor", "nvfp4", "nvfp4:global=mul"})
    expect_contains(of_x(x), {"one scale for all tokens", "fp8_row", "row_scaled", "given"});
  for (const std::string_view x : {"fp8_block:128x128", "mxfp8:32x32"})
    expect_contains(of_x(x), {"tiles of several tokens"});
  for (const std::string_view x : {"fp8_block", "mxfp4", "nvfp4:global=mul:given"}) EXPECT_EQ(of_x(x), "accepted");
  expect_contains(refusal<LinearSpec>("x=mxfp8,w=mxfp8,dy=mxfp8,kernels=fast"), {"unknown kernels 'fast'"});
  for (const std::string_view wrong : {"kernels=fast", "kernels=batch_invariant,", "kernels=batch_invariant,x=mxfp8"})
    EXPECT_NE(refusal<OptionalLinearSpec>(wrong), "accepted") << wrong;
}

TEST(Specs, EveryLegalSpecComesBackFromItsText) {
  std::set<std::string> texts;
  for (const QuantSpec& spec : all_specs()) {
    EXPECT_EQ(QuantSpec::parse(spec.to_string()), spec) << spec.to_string();
    EXPECT_EQ(QuantSpec::parse(spec.to_string()).to_string(), spec.to_string());
    texts.insert(spec.to_string());
  }
  EXPECT_EQ(texts.size(), all_specs().size()) << "two specs share a text";
  EXPECT_EQ(texts.size(), 314u);
}

TEST(Specs, TextsBecomeTheFieldsTheyName) {
  const QuantSpec block = QuantSpec::parse("fp8_block:e5m2:128x128:pow2:eps=0.25");
  EXPECT_EQ(block,
            (QuantSpec{
                .family = Family::fp8_block, .element = Format::e5m2, .square = true, .pow2 = true, .epsilon = 0.25f}));
  const QuantSpec nvfp4 = QuantSpec::parse("nvfp4:rht=unsigned:sr:swizzled");
  EXPECT_EQ(nvfp4.element, Format::e2m1);
  EXPECT_EQ(nvfp4.hadamard, Hadamard::no_signs);
  EXPECT_TRUE(nvfp4.stochastic && nvfp4.swizzled && !nvfp4.square && !nvfp4.row_scaled);
  const QuantSpec four = QuantSpec::parse("nvfp4:16x16:4over6=mse:256");
  EXPECT_EQ(four.four_over_six, FourOverSix::mse);
  EXPECT_EQ(four.block_scale_max(), 256.0f);
  EXPECT_EQ(QuantSpec::parse("nvfp4:4over6=mae").block_scale_max(), 448.0f);
  EXPECT_EQ(QuantSpec::parse("nvfp4:rht").hadamard, Hadamard::signs);
}

TEST(Specs, OptionsInAnyOrderGiveOneCanonicalText) {
  EXPECT_EQ(QuantSpec::parse("nvfp4:swizzled:sr:rht").to_string(), "nvfp4:rht:sr:swizzled");
  EXPECT_EQ(QuantSpec::parse("fp8_block:eps=1e-4:pow2:128x128:e5m2").to_string(),
            "fp8_block:e5m2:128x128:pow2:eps=1e-04");
  EXPECT_EQ(QuantSpec::parse("fp8_tensor:eps=0").to_string(), "fp8_tensor");
}

TEST(Specs, EpsilonSurvivesItsTextBitForBit) {
  for (const float eps : {1e-4f, 0.1f, 0x1p-149f, 0x1.FFFFFEp127f, 3.0f, 1.0f / 3}) {
    QuantSpec spec = QuantSpec::parse("fp8_row");
    spec.epsilon = eps;
    EXPECT_EQ(QuantSpec::parse(spec.to_string()).epsilon, eps) << spec.to_string();
  }
}

TEST(Specs, RefusalsPointAtTheWrongPartAndListWhatIsAllowed) {
  expect_contains(refusal<QuantSpec>("fp7"), {"unknown family", ">>fp7<<", "fp8_tensor", "nvfp4"});
  expect_contains(refusal<QuantSpec>(""), {"unknown family"});
  expect_contains(refusal<QuantSpec>("mxfp8:pow2"), {"unknown option", "mxfp8:>>pow2<<", "32x32", "swizzled"});
  expect_contains(refusal<QuantSpec>("mxfp8:e5m2:e5m2"), {"twice"});
  expect_contains(refusal<QuantSpec>("mxfp8::swizzled"), {"unknown option"});
  expect_contains(refusal<QuantSpec>("fp8_tensor:eps=x"), {"expected eps=F", ">>eps=x<<"});
  for (const std::string_view eps : {"eps", "eps=", "eps=-1", "eps=inf", "eps=nan", "eps=1x"})
    EXPECT_NE(refusal<QuantSpec>(text("fp8_tensor:", eps)), "accepted") << eps;
  for (const std::string_view wrong :
       {"nvfp4:rht=signed", "nvfp4:4over6", "nvfp4:4over6=max", "nvfp4:sr=1", "nvfp4 ", "mxfp8:", "fp8_block:16x16",
        "mxfp4:e5m2", "fp8_row:128x128", "nvfp4:pow2", "NVFP4"})
    EXPECT_NE(refusal<QuantSpec>(wrong), "accepted") << wrong;
}

TEST(Specs, IllegalCombinationsAreRefusedWithTheReason) {
  for (const std::string_view wrong : {"nvfp4:16x16:rht", "nvfp4:row_scaled:rht", "nvfp4:row_scaled:16x16",
                                       "nvfp4:row_scaled:sr", "nvfp4:4over6=mae:sr", "nvfp4:4over6=mse:rht"})
    expect_contains(refusal<QuantSpec>(wrong), {"cannot be", "leave one of them out"});
  expect_contains(refusal<QuantSpec>("nvfp4:256"), {"cannot be", "256 without 4over6", "add 4over6=mae"});
}

TEST(Specs, TheGrammarNamesEveryOption) {
  expect_contains(spec_grammar(), {"e5m2", "128x128", "32x32", "16x16", "pow2", "eps=F", "row_scaled", "rht=unsigned",
                                   "sr", "4over6=mae", "256", "swizzled"});
}

TEST(Specs, ALinearSpecNamesItsThreeRolesInOrder) {
  const std::string text = "x=nvfp4:rht,w=nvfp4:16x16,dy=nvfp4:rht:sr";
  const LinearSpec spec = LinearSpec::parse(text);
  EXPECT_EQ(spec.to_string(), text);
  EXPECT_EQ(LinearSpec::parse(spec.to_string()), spec);
  EXPECT_TRUE(spec.dy.stochastic && spec.w.square && spec.x.hadamard == Hadamard::signs);
}

TEST(Specs, AnInputIsQuantizedOrNot) {
  for (const std::string_view spec : {"none", "mxfp8"}) EXPECT_EQ(InputSpec::parse(spec).to_string(), spec);
  EXPECT_FALSE(InputSpec::parse("none").has_value());
  EXPECT_THROW(InputSpec::parse("nothing"), Error);
}

TEST(Specs, ALinearSpecRefusesWhatDoesNotFitARole) {
  expect_contains(refusal<LinearSpec>("w=mxfp8,x=mxfp8,dy=mxfp8"), {"x=SPEC", "w=mxfp8"});
  expect_contains(refusal<LinearSpec>("x=mxfp8,w=mxfp8"), {"dy=SPEC"});
  expect_contains(refusal<LinearSpec>("x=mxfp8,w=mxfp8,dy=mxfp8,z=mxfp8"), {"z=mxfp8"});
  expect_contains(refusal<LinearSpec>("x=mxfp8,w=fp9,dy=mxfp8"), {"unknown family", "fp9"});
  expect_contains(refusal<LinearSpec>("x=nvfp4:sr,w=nvfp4,dy=nvfp4"), {"stochastic", "remove 'sr' from x"});
  expect_contains(refusal<LinearSpec>("x=nvfp4,w=nvfp4:rht,dy=nvfp4"), {"remove 'rht' from w"});
  expect_contains(refusal<LinearSpec>("x=nvfp4:rht,w=nvfp4,dy=nvfp4"), {"differently"});
  expect_contains(refusal<LinearSpec>("x=nvfp4:rht,w=nvfp4,dy=nvfp4:rht=unsigned"), {"differently"});
  EXPECT_NE(refusal<LinearSpec>(""), "accepted");
  EXPECT_NE(refusal<LinearSpec>("x=mxfp8,w=mxfp8,dy=mxfp8,"), "accepted");
}

}  // namespace
}  // namespace quire::testing
