// Products of plain matrices of the instruction set in use, against double, and that their rows are independent.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "inputs.h"
#include "lanes/lanes.h"
#include "quantized.h"
#include "quire/operations/operations.h"
#include "quire/spec/matrix_element.h"
#include "quire/spec/product.h"

namespace quire::testing {
namespace {

/// A kernel, and the dtypes of its results.
struct PlainKernel {
  std::string name;
  cpu::MatmulKernel run;
  std::vector<DType> results{kFloatTypes.begin(), kFloatTypes.end()};

  friend void PrintTo(const PlainKernel& kernel, std::ostream* out) { *out << kernel.name; }
};

std::vector<PlainKernel> plain_kernels() {
  const cpu::Isa& isa = cpu::active();
  std::vector<PlainKernel> found{{"reference", reference::matmul}, {"generic", isa.kernels->matmul}};
  if (isa.amx_matmul) found.push_back({"by_tiles", *isa.amx_matmul, {DType::bf16}});
#if defined(__x86_64__)
  if (isa.bf16) found.push_back({"by_tiles_in_plain", cpu::amx_in_plain::kMatmul, {DType::bf16}});
#endif
  return found;
}

class PlainProduct : public ::testing::TestWithParam<PlainKernel> {};

/// Rows, columns and contraction: a tile and less, one more than a tile or a panel, one, none.
constexpr std::array<std::array<int64_t, 3>, 10> kSizes{{{1, 1, 1},
                                                         {3, 5, 300},
                                                         {64, 64, 256},
                                                         {65, 67, 257},
                                                         {2, 130, 40},
                                                         {150, 40, 96},
                                                         {33, 300, 500},
                                                         {0, 4, 8},
                                                         {4, 0, 8},
                                                         {3, 2, 0}}};

InputShape shape_of(int64_t rows, int64_t cols, bool transpose) {
  return transpose ? InputShape{cols, rows, 4} : InputShape{rows, cols, 4};
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
    for (const DType out_dtype : GetParam().results)
      for (const DType in : kFloatTypes) {
        const bool transpose_a = (++turn & 1) != 0, transpose_b = (turn & 2) != 0, biased = (turn & 4) != 0;
        const auto [m, n, k] = sizes;
        const Factors f(sizes, transpose_a, transpose_b, in, turn % 3 ? in : out_dtype);
        const Input bias({1, n}, in, Kind::normal, 3);
        Guarded out(m * n * size_of(out_dtype));
        const Matrix a = f.a, b = f.b, bias_row = bias;
        GetParam().run({.a = a,
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

/// A bias takes away what an element was rounded to, so that also the last bits of its sum are in the result.
TEST_P(PlainProduct, ARowHasTheBitsThatItHasAlone) {
  constexpr int64_t cols = 67;
  const DType dtype = GetParam().results.front();
  for (const bool transpose_b : {false, true}) {
    const Factors f({170, cols, 608}, false, transpose_b, dtype, dtype);
    Guarded bias(cols * size_of(dtype)), all(170 * cols * size_of(dtype)), some(40 * cols * size_of(dtype));
    const auto multiply = [&](Matrix a, const void* biases, Guarded& out) {
      GetParam().run({.a = a,
                      .b = f.b,
                      .transpose_b = transpose_b,
                      .bias = {biases, dtype},
                      .out = {out.data(), dtype, a.rows, cols, cols}});
    };
    for (const auto& [first, count] : {std::pair{0, 1}, {1, 1}, {63, 1}, {64, 1}, {169, 1}, {5, 17}, {130, 40}}) {
      Matrix rows = f.a;
      rows.data = static_cast<const char*>(rows.data) + first * rows.row_stride * size_of(dtype);
      rows.rows = count;
      multiply(rows, nullptr, some);
      for (int64_t j = 0; j < cols; ++j) store_element(bias.data(), dtype, j, -load_element(some.data(), dtype, j));
      multiply(rows, bias.data(), some);
      multiply(f.a, bias.data(), all);
      for (int64_t i = 0; i < count * cols; ++i)
        ASSERT_EQ(load_element(some.data(), dtype, i), load_element(all.data(), dtype, first * cols + i))
            << first << ", " << count << ", " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlainProduct, ::testing::ValuesIn(plain_kernels()),
                         [](const auto& kernel) { return kernel.param.name; });

}  // namespace
}  // namespace quire::testing
