// What quantize, dequantize, gemm and column_sum refuse, and with which words; and that nothing is written then.
#include <functional>
#include <limits>

#include "inputs.h"
#include "quantized.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

constexpr Direction kRow = Direction::rowwise, kCol = Direction::columnwise;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

/// One broken rule: how a valid problem is broken, and words that the error must hold (the operation, the values, the
/// remedy).
template <class Problem>
struct Broken {
  std::function<void(Problem&)> breaks;
  std::vector<std::string_view> words;
};

template <class Problem>
void expect_refusals(const Problem& valid, const std::vector<Broken<Problem>>& table,
                     void (*operation)(const Problem&, const Context&)) {
  for (size_t i = 0; i < table.size(); ++i) {
    Problem p = valid;
    table[i].breaks(p);
    std::string message = "accepted";
    try {
      operation(p, host());
    } catch (const Error& e) {
      message = e.what();
    }
    for (const std::string_view word : table[i].words)
      EXPECT_NE(message.find(word), std::string::npos) << "row " << i << ": '" << word << "' is not in: " << message;
  }
}

bool untouched(const Quantized& q) {
  for (const QuantizedSide& s : q.sides)
    for (const Guarded* g : {&s.data, &s.scale, &s.amax})
      if (difference(Guarded(g->size()), *g) != "") return false;
  return true;
}

TEST(Validation, QuantizeNamesTheRuleTheValuesAndTheRemedy) {
  using P = QuantizeProblem;
  const Input x({3, 40}, DType::bf16, Kind::normal, 1);
  Quantized q(QuantSpec::parse("nvfp4"), 3, 40);
  const P valid{.spec = q.spec, .x = x, .rowwise = q.view(kRow), .columnwise = q.view(kCol), .random = {}};
  static const float kScale = 1;
  expect_refusals<P>(
      valid,
      {
          {[](P& p) { p.x.dtype = DType::u8; }, {"quantize", "x must be float32", "uint8", "convert"}},
          {[](P& p) { p.x.rows = -1; }, {"quantize", "negative", "[-1, 40]"}},
          {[](P& p) { p.x.cols = -7; }, {"quantize", "negative", "[3, -7]"}},
          {[](P& p) { p.x.rows = kHuge; }, {"quantize", "more bytes than int64"}},
          {[](P& p) { p.x.rows = p.x.cols = int64_t{1} << 31; }, {"quantize", "more bytes than int64", "split"}},
          {[](P& p) { p.x.row_stride = kHuge; }, {"quantize", "row stride", "further than int64"}},
          {[](P& p) { p.x.data = nullptr; }, {"quantize", "x of [3, 40]", "null pointer"}},
          {[](P& p) { p.rowwise.data = nullptr; }, {"quantize", "rowwise_data", "nvfp4", "[3, 20]", "give all"}},
          {[](P& p) { p.rowwise.scale = nullptr; }, {"quantize", "rowwise_scale", "[3, 3]"}},
          {[](P& p) { p.rowwise.amax = nullptr; }, {"quantize", "rowwise_amax", "[1]"}},
          {[](P& p) { p.columnwise.data = nullptr; }, {"quantize", "columnwise_data", "[40, 2]"}},
          {[](P& p) { p.columnwise.scale = nullptr; }, {"quantize", "columnwise_scale", "[40, 1]"}},
          {[](P& p) { p.scale = &kScale; }, {"quantize", "static scale", "nvfp4", "fp8_tensor"}},
          {[](P& p) { p.spec.element = Format::e4m3; }, {"quantize", "nvfp4", "QuantSpec::parse"}},
          {[](P& p) { p.spec.pow2 = true; }, {"quantize", "nvfp4", "QuantSpec::parse"}},
          {[](P& p) { p.spec.square = p.spec.row_scaled = true; }, {"nvfp4:16x16:row_scaled", "leave one of them out"}},
          {[](P& p) { p.spec.family = static_cast<Family>(9); }, {"quantize", "no such family"}},
      },
      quantize);
  EXPECT_TRUE(untouched(q)) << "an error left traces";
  quantize(valid);
  EXPECT_FALSE(untouched(q));
}

TEST(Validation, SidesMayBeAbsentAndEmptyTensorsMayLackMemoryForCodes) {
  const Input x({3, 40}, DType::f32, Kind::normal, 1);
  quantize({.spec = QuantSpec::parse("mxfp8"), .x = x, .rowwise = {}, .columnwise = {}, .random = {}});
  float scale = -1, amax = -1;
  quantize({.spec = QuantSpec::parse("fp8_tensor"),
            .x = {nullptr, DType::f32, 0, 40, 40},
            .rowwise = {nullptr, &scale, &amax},
            .columnwise = {},
            .random = {}});
  EXPECT_EQ(scale, 1.0f);
  EXPECT_EQ(amax, 0.0f);
  amax = -1;
  quantize({.spec = QuantSpec::parse("nvfp4"),
            .x = {nullptr, DType::f32, 0, 40, 40},
            .rowwise = {nullptr, nullptr, &amax},
            .columnwise = {},
            .random = {}});
  EXPECT_EQ(amax, 0.0f);
}

TEST(Validation, DequantizeNamesTheRuleTheValuesAndTheRemedy) {
  using P = DequantizeProblem;
  const Quantized q(QuantSpec::parse("nvfp4:rht"), 20, 40);
  Guarded out(40 * 32 * 4);
  P valid = q.decoding(kCol);
  valid.out = {out.data(), DType::f32, 40, 32, 32};
  expect_refusals<P>(
      valid,
      {
          {[](P& p) { p.out.dtype = DType::u8; }, {"dequantize", "out must be float32", "uint8"}},
          {[](P& p) { p.out.cols = 20; }, {"dequantize", "[40, 32]", "columnwise of [20, 40]", "[40, 20]"}},
          {[](P& p) { p.direction = kRow; }, {"dequantize", "[20, 40]", "rowwise", "[40, 32]"}},
          {[](P& p) { p.rows = -1; }, {"dequantize", "negative"}},
          {[](P& p) { p.out.row_stride = 31; }, {"dequantize", "overlap", "31"}},
          {[](P& p) { p.out.data = nullptr; }, {"dequantize", "out", "null pointer"}},
          {[](P& p) { p.data = nullptr; }, {"dequantize", "columnwise_data", "[40, 16]"}},
          {[](P& p) { p.scale = nullptr; }, {"dequantize", "columnwise_scale", "[40, 2]"}},
          {[](P& p) { p.amax = nullptr; }, {"dequantize", "columnwise_amax", "[1]"}},
          {[](P& p) { p.spec.block_scale_max_256 = true; }, {"256 without 4over6"}},
      },
      dequantize);
  EXPECT_EQ(difference(Guarded(out.size()), out), "") << "an error left traces";
  P mxfp8 = Quantized(QuantSpec::parse("mxfp8"), 0, 40).decoding(kRow);
  mxfp8.data = mxfp8.scale = nullptr;
  mxfp8.out = {nullptr, DType::f32, 0, 40, 40};
  dequantize(mxfp8);
}

TEST(Validation, GemmNamesTheRuleTheValuesAndTheRemedy) {
  using P = GemmProblem;
  const Quantized a(QuantSpec::parse("nvfp4:rht"), 33, 20), b(QuantSpec::parse("nvfp4:rht"), 33, 24);
  const Quantized other(QuantSpec::parse("nvfp4"), 48, 24);
  Guarded out(20 * 24 * 4);
  const P valid{.a = a.operand(kCol), .b = b.operand(kCol), .out = {out.data(), DType::f32, 20, 24, 24}};
  expect_refusals<P>(
      valid,
      {
          {[](P& p) { p.a.contraction = 32; }, {"gemm", "agree on the contraction", "32 and 48"}},
          {[](P& p) { p.a.contraction = 33; }, {"gemm", "groups of 16", "33", "columnwise_tokens"}},
          {[](P& p) { p.b.outer = -24; }, {"gemm", "negative"}},
          {[](P& p) { p.a.outer = kHuge; }, {"gemm", "more bytes than int64"}},
          {[&](P& p) { p.b = other.operand(kCol); }, {"gemm", "transformed alike", "'rht'"}},
          {[](P& p) { p.b.spec.hadamard = Hadamard::no_signs; }, {"gemm", "transformed alike"}},
          {[](P& p) { p.out.rows = 21; }, {"gemm", "[20, 24]", "[21, 24]"}},
          {[](P& p) { p.out.dtype = DType::u8; }, {"gemm", "out must be float32", "uint8"}},
          {[](P& p) { p.out.row_stride = 23; }, {"gemm", "overlap", "23"}},
          {[](P& p) { p.out.data = nullptr; }, {"gemm", "out", "null pointer"}},
          {[](P& p) { p.a.data = nullptr; }, {"gemm", "columnwise_data", "[20, 24]"}},
          {[](P& p) { p.b.scale = nullptr; }, {"gemm", "columnwise_scale", "[24, 3]"}},
          {[](P& p) { p.b.amax = nullptr; }, {"gemm", "columnwise_amax"}},
          {[](P& p) { p.bias = p.out.data, p.bias_dtype = DType::u8; }, {"gemm", "bias must be float32", "uint8"}},
          {[](P& p) { p.a.spec.swizzled = p.a.spec.pow2 = true; }, {"gemm", "nvfp4:rht:swizzled"}},
      },
      gemm);
  EXPECT_EQ(difference(Guarded(out.size()), out), "") << "an error left traces";
}

TEST(Validation, AnAmaxThatScalesNothingMayBeAbsentFromAProduct) {
  const Input x({4, 8}, DType::f32, Kind::ties, 1);
  const Quantized q = quantized(reference_runner(), QuantSpec::parse("fp8_tensor"), x);
  Guarded out(4 * 4 * 4);
  GemmProblem p{.a = q.operand(kRow), .b = q.operand(kRow), .out = {out.data(), DType::f32, 4, 4, 4}};
  p.a.amax = p.b.amax = nullptr;
  gemm(p);
  DequantizeProblem d = q.decoding(kRow);
  Guarded values(4 * 8 * 4);
  d.amax = nullptr;
  d.out = {values.data(), DType::f32, 4, 8, 8};
  dequantize(d);
  EXPECT_NE(difference(Guarded(values.size()), values), "");
}

TEST(Validation, ColumnSumNamesTheRuleTheValuesAndTheRemedy) {
  using P = ColumnSumProblem;
  const Input x({3, 8}, DType::f32, Kind::normal, 1);
  Guarded out(8 * 4);
  expect_refusals<P>({x, out.data(), DType::f32},
                     {
                         {[](P& p) { p.x.dtype = DType::u8; }, {"column_sum", "x must be float32"}},
                         {[](P& p) { p.out_dtype = DType::u8; }, {"column_sum", "out must be float32"}},
                         {[](P& p) { p.out_dtype = static_cast<DType>(77); }, {"out must be float32", "DType 77"}},
                         {[](P& p) { p.x.dtype = static_cast<DType>(200); }, {"x must be float32", "DType 200"}},
                         {[](P& p) { p.x.rows = -1; }, {"column_sum", "negative"}},
                         {[](P& p) { p.x.data = nullptr; }, {"column_sum", "x of [3, 8]", "null pointer"}},
                         {[](P& p) { p.out = nullptr; }, {"column_sum", "out of [8]", "null pointer"}},
                     },
                     column_sum);
  EXPECT_EQ(difference(Guarded(out.size()), out), "") << "an error left traces";
}

}  // namespace
}  // namespace quire::testing
