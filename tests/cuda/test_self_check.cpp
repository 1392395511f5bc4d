// The self-check of rows: each is compared with its reference at its first use, and one that disagrees is not used.
#include <gtest/gtest.h>

#include <iostream>
#include <set>

#include "cuda/mutation.h"
#include "cuda/ptx_files.h"
#include "cuda/row_examples.h"
#include "quire/cuda/self_check.h"
#include "quire/device/warning.h"

namespace quire::testing {
namespace {

std::vector<std::string>* heard = nullptr;

bool many_cases() {
  const char* const cases = std::getenv("QUIRE_CUDA_CASES");
  return cases && std::string_view(cases) == "many";
}

/// The device with checks, and an index that no other test has, so that nothing is known of its rows.
class SelfCheck : public ::testing::Test {
 protected:
  void SetUp() override {
    if (on_gpu()) GTEST_SKIP() << "a GPU has no other index, of which nothing is known";
    cuda::set_self_check(true);
    heard = &warnings;
    set_warn([](const std::string& text) { heard->push_back(text); });
    static int index = 0;
    context = device();
    context.index = index += 1000;
  }
  void TearDown() override {
    set_warn(nullptr);
    cuda::set_self_check(false);
  }
  CudaDevice& device() { return cases.twins().device; }

  /// What a call adds to a count of the device.
  template <class Problem>
  uint64_t launches_of(const Problem& p) {
    const uint64_t before = device().launches();
    dispatch(p, context);
    return device().launches() - before;
  }
  template <class Problem>
  uint64_t reads_of(const Problem& p) {
    const uint64_t before = device().reads();
    dispatch(p, context);
    return device().reads() - before;
  }

  ProductCases cases{1};
  Context context;
  std::vector<std::string> warnings;
};

/// Whether a row has its weight decoded, by a row of dequantize that is compared too.
template <class Problem>
bool decodes_first(const Problem& p, std::string_view row) {
  if constexpr (std::is_same_v<Problem, MatmulProblem>) return row == "pipelined" && p.codes;
  return false;
}

/// Every row of every table, whatever stands in it, has a small problem that it takes, and agrees with its reference.
TEST_F(SelfCheck, ComparesEachRowOfTheTablesOnceForAKindOfProblemAndADevice) {
  std::set<std::string> compared;
  each_example(cases, [&](const auto& p, const auto&) {
    SCOPED_TRACE(to_string(p));
    cuda::set_self_check(false);
    const uint64_t unchecked = launches_of(p);
    cuda::set_self_check(true);
    ++context.index;
    for (const auto& row : kernels<std::remove_cvref_t<decltype(p)>>(context)) {
      if (!cuda::detail::is_checked(row.name)) continue;
      const uint64_t reads = device().reads(), launches = device().launches();
      if (!row.takes(p, context)) continue;
      compared.insert(text(p.kOp, ":", row.name));
      EXPECT_EQ(device().reads(), reads + 1 + decodes_first(p, row.name)) << row.name;
      EXPECT_GT(device().launches(), launches + 3) << row.name;
    }
    EXPECT_EQ(reads_of(p), 0u);
    EXPECT_EQ(launches_of(p), unchecked);
  });
  EXPECT_EQ(warnings, std::vector<std::string>());
  for (const char* row : {"quantize:tiles", "amax:tiles",          "dequantize:vector",    "gemm:skinny",
                          "gemm:few_rows",  "gemm:pipelined_bf16", "gemm:decode",          "gemm:decode32",
                          "matmul:skinny",  "matmul:pipelined",    "matmul:tiles",         "matmul:tiles32",
                          "norm:vector",    "norm_grad:vector",    "activation:vector",    "activation_grad:vector",
                          "route:warp",     "route_grad:warp",     "limit_capacity:block", "expert_rows:block",
                          "permute:vector", "unpermute:vector",    "unpermute_dot:vector"})
    EXPECT_TRUE(compared.contains(row)) << row;
}

/// What a row has not been compared in is a kind of its own: another spec, dtype, or number of rows.
TEST_F(SelfCheck, TellsKindsApart) {
  Examples e(cases);
  EXPECT_EQ(reads_of(e.quantize("mxfp8", DType::bf16)), 1u);
  EXPECT_EQ(reads_of(e.quantize("mxfp8", DType::f32)), 1u);
  EXPECT_EQ(reads_of(e.quantize("mxfp8:e5m2", DType::f32)), 1u);
  EXPECT_EQ(reads_of(e.gemm("mxfp8", "mxfp8", 1)), 1u);
  EXPECT_EQ(reads_of(e.gemm("mxfp8", "mxfp8", 2)), 1u);
  EXPECT_EQ(reads_of(e.gemm("mxfp8", "mxfp4", 2)), 1u);
  EXPECT_EQ(reads_of(e.gemm("mxfp8", "mxfp8", 30)), 1u);
  EXPECT_EQ(reads_of(e.gemm("mxfp8", "mxfp8", 20)), 0u);
}

/// The products of a Linear, of one tensor and of groups, with every recipe's operands.
TEST_F(SelfCheck, FindsProductsOfEveryRecipeRight) {
  uint64_t checked = 0, turn = 0;
  for (const auto& [x, w, dy] : {std::array{"fp8_tensor:nan", "fp8_tensor:nan", "fp8_tensor:e5m2:nan"},
                                 std::array{"fp8_row", "fp8_row:pow2", "fp8_row:e5m2"},
                                 std::array{"fp8_block:pow2", "fp8_block:128x128:pow2", "fp8_block:pow2"},
                                 std::array{"mxfp8:swizzled", "mxfp8:swizzled", "mxfp8:e5m2:swizzled"},
                                 std::array{"nvfp4:rht", "nvfp4:16x16", "nvfp4:rht:sr"},
                                 std::array{"fp8_tensor:given", "mxfp4:interleaved", "nvfp4:global=div"}})
    for (const int groups : {0, 1, 2}) {
      if (++turn % 5 != 1 && !many_cases()) continue;  // of groups each, and most families
      cases.clear();
      const int64_t count = groups ? 2 : 1, tokens = 36;
      const RowGroups of_tokens = groups == 0   ? RowGroups{}
                                  : groups == 1 ? RowGroups::equal(2, tokens / 2)
                                                : cases.groups({10, 36}, tokens, true);
      const RowGroups of_w = groups ? RowGroups::equal(2, 16) : RowGroups{};
      const auto ask = [&](const Operand& a, const Operand& b, int64_t rows, int64_t cols) {
        if ((a.spec.hadamard != Hadamard::off && a.direction == kColumns) !=
            (b.spec.hadamard != Hadamard::off && b.direction == kColumns))
          return;
        GemmProblem p{.a = a, .b = b, .out = cases.output(kDTypes[checked % 3], rows, cols).out};
        SCOPED_TRACE(to_string(p));
        checked += reads_of(p);
      };
      const Operand w_columns = cases.operand(w, kColumns, count * 16, 32, of_w);
      ask(cases.operand(x, kRows, tokens, 32, of_tokens), cases.operand(w, kRows, count * 16, 32, of_w), tokens, 16);
      ask(cases.operand(dy, kRows, tokens, 16, of_tokens), w_columns, tokens, 32);
      ask(cases.operand(dy, kColumns, tokens, 16, of_tokens), cases.operand(x, kColumns, tokens, 32, of_tokens),
          count * 16, 32);
    }
  EXPECT_EQ(warnings, std::vector<std::string>());
  EXPECT_GE(checked, 8u);
  std::cout << checked << " kinds of products checked\n";
}

/// PTX in which a kernel does what another one should.
std::string exchanged(const std::string& module, const std::string& one, const std::string& other) {
  std::string ptx = ptx_of(module + ".ptx");
  const auto put = [&](const std::string& from, const std::string& to) {
    const size_t at = ptx.find(".visible .entry " + from + "(");
    ASSERT_NE(at, std::string::npos) << from;
    ptx.replace(at + 16, from.size(), to);
  };
  put(one, "a_third_name"), put(other, one), put("a_third_name", other);
  return ptx;
}

/// A row whose kernel is another one is named, and the next one computes.
template <class Problem>
void expect_refused(const Problem& p, const std::vector<Written>& written, const std::string& row,
                    const Context& context, std::vector<std::string>& warnings) {
  SCOPED_TRACE(to_string(p));
  dispatch(p, host());
  std::vector<std::string> expected;
  for (const Written& one : written) expected.push_back(one.contents());
  for (const Written& one : written) std::memset(one.data, 0xA5, static_cast<size_t>(one.bytes));
  for (int call = 0; call < 2; ++call) {
    dispatch(p, context);
    for (size_t i = 0; i < written.size(); ++i) EXPECT_EQ(written[i].contents(), expected[i]) << i;
  }
  const std::string rows = explain_choice(p, context);
  EXPECT_NE(rows.find(row + ": its self-check failed on this device: "), std::string::npos) << rows;
  EXPECT_NE(rows.find("QUIRE_SELF_CHECK=off"), std::string::npos) << rows;
  EXPECT_NE(rows.find("reference: runs"), std::string::npos) << rows;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find(text("kernel '", row, "' of ", p.kOp, " failed its self-check on cuda:")),
            std::string::npos)
      << warnings[0];
  warnings.clear();
}

TEST_F(SelfCheck, RefusesAQuantizerThatIsBroken) {
  if (on_gpu()) GTEST_SKIP() << "kernels are exchanged on the emulator alone";
  device().plant("tiles_fp8", exchanged("tiles_fp8", "mxfp8_bf16", "mxfp8_e5m2_bf16"));
  Examples e(cases);
  const QuantizeProblem p = e.quantize();
  expect_refused(p, e.written, "tiles", context, warnings);
  EXPECT_NE(explain_choice(Examples(cases).quantize("fp8_block"), context).find("tiles: runs"), std::string::npos);
}

TEST_F(SelfCheck, RefusesAQuantizerThatIsAStepOfAnotherProblem) {
  if (on_gpu()) GTEST_SKIP() << "kernels are exchanged on the emulator alone";
  device().plant("tiles_fp8", exchanged("tiles_fp8", "mxfp8_f32", "mxfp8_e5m2_f32"));
  Examples e(cases);
  NormProblem p = e.norm();
  QuantizeProblem q = e.quantize("mxfp8", DType::f32);
  p.out.spec = q.spec, p.out.rowwise = q.rowwise;
  // The norm's own rows agree.
  dispatch(p, host());
  const std::string expected = e.written[2].contents();
  dispatch(p, context);
  EXPECT_EQ(e.written[2].contents(), expected);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("kernel 'tiles' of quantize"), std::string::npos) << warnings[0];
}

/// All of its products have another sign, or another order of magnitude.
TEST_F(SelfCheck, RefusesAProductThatIsBroken) {
  if (on_gpu()) GTEST_SKIP() << "kernels are changed on the emulator alone";
  std::string ptx = ptx_of("skinny.ptx");
  for (size_t at = 0; (at = ptx.find("add.rn.f32", at)) != std::string::npos; ++at) ptx.replace(at, 3, "sub");
  device().plant("skinny", ptx);
  Examples e(cases);
  const GemmProblem p = e.gemm("mxfp8", "mxfp8", 2);
  contract(p);
  const std::string expected = e.written[0].contents();
  dispatch(p, context);
  EXPECT_EQ(e.written[0].contents(), expected);  // by few_rows, whose bits are those of the contract
  EXPECT_NE(explain_choice(p, context).find("skinny: its self-check failed on this device: "), std::string::npos);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("kernel 'skinny' of gemm failed"), std::string::npos) << warnings[0];
}

/// Products of many rows and columns go to a kernel of their own, whichever of its groups' ends the host knows.
TEST_F(SelfCheck, RefusesAProductWhoseLargeTilesAreBroken) {
  if (on_gpu()) GTEST_SKIP() << "kernels are changed on the emulator alone";
  std::string ptx = ptx_of("decode.ptx");
  const size_t begin = ptx.find(".visible .entry decode_128("), end = ptx.find(".visible .entry ", begin + 1);
  ASSERT_NE(begin, std::string::npos);
  for (size_t at = begin; (at = ptx.find("add.rn.f32", at)) < std::min(end, ptx.size()); ++at)
    ptx.replace(at, 3, "sub");
  device().plant("decode", ptx);
  const auto product = [&](const RowGroups& groups, int64_t rows, int64_t cols) {
    const RowGroups of_w = is_one(groups) ? RowGroups{} : RowGroups::equal(2, cols);
    return GemmProblem{.a = cases.operand("fp8_block", kRows, rows, 32, groups),
                       .b = cases.operand("fp8_block", kRows, groups.count * cols, 32, of_w),
                       .out = cases.output(DType::f32, rows, cols).out};
  };
  for (const RowGroups& groups : {RowGroups{}, RowGroups::equal(2, 80), cases.groups({70, 160}, 160, true)}) {
    if (!is_one(groups) && !many_cases()) continue;
    const GemmProblem p = product(groups, is_one(groups) ? 80 : 160, 200);
    dispatch(p, context);
    EXPECT_NE(explain_choice(p, context).find("decode: its self-check failed"), std::string::npos) << groups.count;
    EXPECT_NE(explain_choice(p, context).find("decode32: runs"), std::string::npos) << groups.count;
  }
  const GemmProblem small = product({}, 80, 16);
  dispatch(small, context);
  EXPECT_NE(explain_choice(small, context).find("decode: runs"), std::string::npos) << explain_choice(small, context);
  EXPECT_EQ(warnings.size(), 1u);
}

/// An empty tensor has no memory, which a small problem of its kind has all the same.
TEST_F(SelfCheck, SolvesSmallProblemsWhereTheFirstOfTheirKindIsEmpty) {
  Examples e(cases);
  ExpertRowsProblem sort{.num_experts = 3};
  sort.offsets = cases.twins().room<int32_t>(3);
  dispatch(sort, context);
  device().synchronize();
  EXPECT_EQ(std::vector<int32_t>(sort.offsets, sort.offsets + 3), std::vector<int32_t>(3));
  NormGradProblem norm = e.norm_grad();
  norm.kind = NormKind::layer;
  norm.dy.rows = norm.x.rows = norm.dx.rows = 0;
  norm.mean = norm.rstd = nullptr, norm.dgamma = nullptr;
  EXPECT_EQ(reads_of(norm), 1u);
  EXPECT_EQ(warnings, std::vector<std::string>());
}

TEST_F(SelfCheck, WaitsForAnEagerUseWhereAStreamIsCaptured) {
  if (on_gpu()) GTEST_SKIP() << "kernels are exchanged on the emulator alone";
  device().plant("tiles_fp8", exchanged("tiles_fp8", "mxfp8_bf16", "mxfp8_e5m2_bf16"));
  Examples e(cases);
  const QuantizeProblem p = e.quantize();
  context.capturing = true;
  cuda::set_self_check(false);
  const uint64_t unchecked = launches_of(p);
  cuda::set_self_check(true);
  EXPECT_EQ(launches_of(p), unchecked);
  EXPECT_EQ(device().reads(), 0u);
  EXPECT_EQ(warnings.size(), 0u);
  context.capturing = false;
  expect_refused(p, e.written, "tiles", context, warnings);
  context.capturing = true;  // what is known is used there too
  EXPECT_NE(explain_choice(p, context).find("tiles: its self-check failed"), std::string::npos);
}

TEST_F(SelfCheck, ComputesNothingForWhoeverOnlyAsksWhatWouldRun) {
  Examples e(cases);
  const QuantizeProblem p = e.quantize();
  EXPECT_NE(explain_choice(p, context).find("tiles: runs"), std::string::npos);
  EXPECT_EQ(device().launches(), 0u);
  context.workspace = nullptr;
  EXPECT_TRUE(kernels<QuantizeProblem>(context)[0].takes(p, context));
  EXPECT_EQ(device().launches(), 0u);
}

struct Subject {
  const char* module;
  const char* function;
  CudaDevice& device;
  Context& context;
};

/// One instruction of a kernel is changed: the real problem is solved right all the same, by the next row, or the
/// change is none for it.
template <class Problem>
void expect_right_with_mutants(const Subject& s, const Problem& p, const std::vector<Written>& written,
                               std::array<int, 2>& found) {
  const std::string ptx = ptx_of(std::string(s.module) + ".ptx");
  std::vector<Mutant> mutants = mutants_of(ptx);
  std::erase_if(mutants, [&](const Mutant& m) {
    return m.function != s.function || m.kind == "barrier" || m.kind == "comparison";
  });
  ASSERT_FALSE(mutants.empty()) << s.function;
  std::shuffle(mutants.begin(), mutants.end(), std::mt19937(3));
  mutants.resize(std::min<size_t>(mutants.size(), many_cases() ? 40 : 6));
  dispatch(p, host());
  std::vector<std::string> expected;
  for (const Written& one : written) expected.push_back(one.contents());
  const auto is_right = [&] {
    for (const Written& one : written) std::memset(one.data, 0xA5, static_cast<size_t>(one.bytes));
    dispatch(p, s.context);
    for (size_t i = 0; i < written.size(); ++i)
      if (written[i].contents() != expected[i]) return false;
    return true;
  };
  for (const Mutant& m : mutants) try {
      s.device.plant(s.module, mutated(ptx, m));
      cuda::set_self_check(false);
      const bool harmless = is_right();
      cuda::set_self_check(true);
      ++s.context.index;
      const bool right = is_right();
      ++found[harmless];
      EXPECT_TRUE(right) << m.text();
    } catch (const emulator::Error&) {
      // Out of its memory, or of the language: no row of this kind returns.
    }
}

TEST_F(SelfCheck, LeavesNoMutantOfAKernelItsResults) {
  if (on_gpu()) GTEST_SKIP() << "kernels are exchanged on the emulator alone";
  std::array<int, 2> found{};
  const auto with = [&](const char* module, const char* function, const auto& make) {
    cases.clear();
    Examples e(cases);
    const auto p = make(e);
    expect_right_with_mutants({module, function, device(), context}, p, e.written, found);
  };
  with("tiles_fp8", "mxfp8_bf16", [](Examples& e) { return e.quantize(); });
  with("tiles_fp4", "nvfp4_f32", [](Examples& e) { return e.quantize("nvfp4", DType::f32); });
  with("dequantize_vector", "dequantize_along", [](Examples& e) { return e.dequantize("nvfp4", kRows); });
  with("dequantize_vector", "dequantize_across", [](Examples& e) { return e.dequantize("mxfp8", kColumns); });
  with("norm_vector", "norm_vector", [](Examples& e) { return e.norm(); });
  with("column_vector", "gamma_chunks_vector", [](Examples& e) { return e.norm_grad(); });
  with("pointwise_vector", "activation_vector", [](Examples& e) { return e.activation(); });
  with("route", "route_warps", [](Examples& e) { return e.route(); });
  with("permute_vector", "unpermute_vectors", [](Examples& e) { return e.unpermute(true); });
  with("moe", "rank_in_block", [](Examples& e) { return e.capacity(); });
  EXPECT_GE(found[0], 3);
  std::cout << found[0] << " mutants refused, " << found[1] << " that change nothing here\n";
}

}  // namespace
}  // namespace quire::testing
