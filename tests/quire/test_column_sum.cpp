// Sums over rows of the instruction set in use, against double.
#include <cmath>

#include "inputs.h"
#include "quantized.h"
#include "quire/base/parallel.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

class ColumnSum : public EveryRunner {};

constexpr InputShape kShapes[] = {{0, 5},         {0, 0},     {1, 1},     {1, 40, 3},    {7, 0},      {2, 3, 0, 1},
                                  {33, 17, 1, 1}, {128, 129}, {1000, 20}, {257, 300, 5}, {4096, 3, 2}};

TEST_P(ColumnSum, IsWithinTheBoundOfRowsRoundingsAndInputsAreReadInPlace) {
  uint64_t turn = 0;
  for (const InputShape& shape : kShapes)
    for (const DType in : kFloatTypes)
      for (const DType out_dtype : kFloatTypes) {
        const Input input(shape, in, Kind::normal, ++turn);
        const Matrix x = input;
        SCOPED_TRACE(text(name(in), " [", x.rows, ", ", x.cols, "] to ", name(out_dtype)));
        Guarded out(x.cols * size_of(out_dtype));
        GetParam().run.column_sum({x, out.data(), out_dtype});
        ASSERT_TRUE(out.intact());
        const double unit = out_dtype == DType::f32 ? 0x1p-24 : out_dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
        for (int64_t j = 0; j < x.cols; ++j) {
          double sum = 0, magnitude = 0;
          for (int64_t i = 0; i < x.rows; ++i) {
            const double value = static_cast<double>(load_element(x.data, in, i * x.row_stride + j));
            sum += value;
            magnitude += std::fabs(value);
          }
          const double bound = static_cast<double>(x.rows) * 0x1p-24 * magnitude;
          ASSERT_NEAR(sum, static_cast<double>(load_element(out.data(), out_dtype, j)),
                      bound + unit * (std::fabs(sum) + bound))
              << "column " << j;
        }
      }
}

TEST_P(ColumnSum, ReadsOneRowAgainAndAgainThroughStrideZero) {
  const Input row({1, 37}, DType::bf16, Kind::ties, 3);
  Matrix x = row;
  x.rows = 64;
  x.row_stride = 0;
  Guarded out(37 * 4);
  GetParam().run.column_sum({x, out.data(), DType::f32});
  for (int64_t j = 0; j < 37; ++j) EXPECT_EQ(out.as<float>()[j], 64 * load_element(x.data, x.dtype, j));
}

TEST_P(ColumnSum, DoesNotDependOnHowWorkIsCut) {
  const Input x({300, 500}, DType::f32, Kind::normal, 4);
  Guarded whole(500 * 4), cut(500 * 4);
  GetParam().run.column_sum({x, whole.data(), DType::f32});
  const Executor before = set_executor([](int64_t count, int64_t grain, const auto& body) {
    const int64_t step = std::max<int64_t>(grain, 1);
    for (int64_t begin = (count - 1) / step * step; begin >= 0; begin -= step)
      body(begin, std::min(begin + step, count));
  });
  GetParam().run.column_sum({x, cut.data(), DType::f32});
  set_executor(before);
  EXPECT_EQ(difference(whole, cut), "");
}

QUIRE_FOR_EVERY_RUNNER(ColumnSum);

}  // namespace
}  // namespace quire::testing
