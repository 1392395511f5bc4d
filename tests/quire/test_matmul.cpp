// Products of plain matrices of the instruction set in use, against double, and that their rows are independent.
#include <array>
#include <cmath>

#include "inputs.h"
#include "quantized.h"
#include "quire/operations/operations.h"
#include "quire/spec/matrix_element.h"
#include "quire/spec/product.h"

namespace quire::testing {
namespace {

class PlainProduct : public EveryRunner {};

/// Rows, columns and contraction: a tile and less, one more than a tile or a panel, one, none.
constexpr std::array<std::array<int64_t, 3>, 8> kSizes{
    {{1, 1, 1}, {3, 5, 300}, {64, 64, 256}, {65, 67, 257}, {2, 130, 40}, {0, 4, 8}, {4, 0, 8}, {3, 2, 0}}};

InputShape shape_of(int64_t rows, int64_t cols, bool transpose) {
  return transpose ? InputShape{cols, rows, 3} : InputShape{rows, cols, 3};
}

/// a and b of these sizes, of which the product reads one dtype or two.
struct Factors {
  Factors(const std::array<int64_t, 3>& sizes, bool transpose_a, bool transpose_b, DType in, DType in_b)
      : a(shape_of(sizes[0], sizes[2], transpose_a), in, Kind::normal, 1),
        b(shape_of(sizes[2], sizes[1], transpose_b), in_b, Kind::normal, 2) {}
  Input a, b;
};

TEST_P(PlainProduct, IsWithinTheBoundWhateverTheSizesDtypesAndTranspositions) {
  int turn = 0;
  for (const auto& sizes : kSizes)
    for (const DType out_dtype : kFloatTypes)
      for (const DType in : kFloatTypes) {
        const bool transpose_a = (++turn & 1) != 0, transpose_b = (turn & 2) != 0, biased = (turn & 4) != 0;
        const auto [m, n, k] = sizes;
        const Factors f(sizes, transpose_a, transpose_b, in, turn % 3 ? in : out_dtype);
        const Input bias({1, n}, in, Kind::normal, 3);
        Guarded out(m * n * size_of(out_dtype));
        const Matrix a = f.a, b = f.b, bias_row = bias;
        GetParam().run.matmul({.a = a,
                               .b = b,
                               .transpose_a = transpose_a,
                               .transpose_b = transpose_b,
                               .bias = {biased ? bias_row.data : nullptr, in},
                               .out = {out.data(), out_dtype, m, n, n}});
        ASSERT_TRUE(out.intact());
        const PlainValues left{a, transpose_a, out_dtype}, right{b, transpose_b, out_dtype};
        const double unit = out_dtype == DType::f32 ? 0x1p-24 : out_dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j) {
            const float added = biased ? rounded(out_dtype, load_element(bias_row, 0, j)) : 0.0f;
            double sum = static_cast<double>(added), magnitude = std::fabs(sum);
            for (int64_t l = 0; l < k; ++l) {
              const double term = static_cast<double>(left(i, l)) * static_cast<double>(right(l, j));
              sum += term, magnitude += std::fabs(term);
            }
            const double bound = static_cast<double>(k + 6) * 0x1p-24 * magnitude;
            ASSERT_NEAR(static_cast<double>(load_element(out.data(), out_dtype, i * n + j)), sum,
                        bound + unit * (std::fabs(sum) + bound))
                << m << " x " << n << " x " << k << ", row " << i << ", column " << j;
          }
      }
}

TEST_P(PlainProduct, ARowHasTheBitsThatItHasAlone) {
  for (const bool transpose_b : {false, true}) {
    const Factors f({70, 67, 600}, false, transpose_b, DType::f32, DType::f32);
    const Matrix a = f.a, b = f.b;
    Guarded all(70 * 67 * 4), one(67 * 4);
    GetParam().run.matmul({.a = a, .b = b, .transpose_b = transpose_b, .out = {all.data(), DType::f32, 70, 67, 67}});
    for (const int64_t i : {0, 1, 3, 63, 64, 69}) {
      Matrix row = a;
      row.data = static_cast<const float*>(a.data) + i * a.row_stride;
      row.rows = 1;
      GetParam().run.matmul({.a = row, .b = b, .transpose_b = transpose_b, .out = {one.data(), DType::f32, 1, 67, 67}});
      for (int64_t j = 0; j < 67; ++j) ASSERT_EQ(one.as<float>()[j], all.as<float>()[i * 67 + j]) << i << ", " << j;
    }
  }
}

QUIRE_FOR_EVERY_RUNNER(PlainProduct);

}  // namespace
}  // namespace quire::testing
