// The products of every instruction set against products in double of operands decoded by the contract's own words.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>

#include "every_product.h"
#include "inputs.h"
#include "quire/base/parallel.h"
#include "quire/cpu/isa.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "random_operand.h"

namespace quire::testing {
namespace {

constexpr const char* kSpecs =
    "fp8_tensor fp8_tensor:e5m2 fp8_row fp8_block fp8_block:128x128 mxfp8 mxfp8:e5m2 mxfp8:32x32 mxfp8:swizzled mxfp4 "
    "mxfp4:swizzled nvfp4 nvfp4:16x16 nvfp4:row_scaled nvfp4:rht nvfp4:4over6=mae:256 nvfp4:swizzled "
    "fp8_tensor:interleaved fp8_block:interleaved mxfp8:interleaved mxfp8:e5m2:32x32:interleaved mxfp4:interleaved "
    "nvfp4:16x16:interleaved nvfp4:rht:interleaved nvfp4:global=mul nvfp4:row_scaled:global=div";
constexpr std::array kDirections{Direction::rowwise, Direction::columnwise};

struct Expected {
  double product = 0, magnitude = 0;  ///< sums of a*b and |a*b|
};

Expected expected_at(const RandomOperand& a, const RandomOperand& b, int64_t i, int64_t j) {
  Expected e;
  const int64_t k = a.operand.contraction;
  for (int64_t l = 0; l < k; ++l) {
    const double p = a.values[static_cast<size_t>(i * k + l)] * b.values[static_cast<size_t>(j * k + l)];
    e.product += p, e.magnitude += std::abs(p);
  }
  return e;
}

/// Compares every float32 output with the bound of gemm.h.
::testing::AssertionResult within_bound(const GemmProblem& p, const RandomOperand& a, const RandomOperand& b,
                                        const Output& out) {
  const double units = static_cast<double>(p.a.contraction + 6) * 0x1p-24;
  for (int64_t i = 0; i < out.rows; ++i)
    for (int64_t j = 0; j < out.cols; ++j) {
      const Expected e = expected_at(a, b, i, j);
      const double got = static_cast<double>(out.at(i, j)), error = std::abs(got - e.product);
      if (!(error <= units * e.magnitude))
        return ::testing::AssertionFailure() << to_string(p) << " at " << i << ", " << j << ": got " << got << ", want "
                                             << e.product << " within " << units * e.magnitude;
    }
  if (!out.intact()) return ::testing::AssertionFailure() << to_string(p) << ": wrote outside its output";
  return ::testing::AssertionSuccess();
}

class CpuGemm : public ::testing::TestWithParam<Kernel> {
 protected:
  /// False if the kernel does not take the problem.
  bool multiply(const GemmProblem& p) const {
    if (!GetParam().takes(p)) return false;
    GetParam().run(p);
    return true;
  }
  /// A spec that the kernel takes.
  const char* spec(const char* eight_bits, const char* four_bits) const {
    const Takes formats = GetParam().formats;
    return formats == Takes::nvfp4 ? "nvfp4" : formats == Takes::four_bits ? four_bits : eight_bits;
  }
};

INSTANTIATE_TEST_SUITE_P(All, CpuGemm, ::testing::ValuesIn(kernels()),
                         [](const auto& kernel) { return kernel.param.name; });

TEST_P(CpuGemm, every_pair_of_operands_stays_within_the_stated_bound) {
  const int64_t m = 19, n = 37, k = 272;  // 16 * 17: whole Hadamard groups, ragged blocks of 32 and 128
  std::vector<RandomOperand> left, right;
  std::istringstream specs(kSpecs);
  for (std::string spec; specs >> spec;)
    for (const Direction d : kDirections) {
      left.emplace_back(spec, d, std::array{m, k}, left.size() + 1);
      right.emplace_back(spec, d, std::array{n, k}, right.size() + 1001);
    }
  for (size_t x = 0; x < left.size(); ++x)
    for (size_t y = 0; y < right.size(); y += 1 + x % 3) {
      Output out(m, n, DType::f32);
      const GemmProblem p = problem(left[x], right[y], out);
      if (!multiply(p)) continue;
      ASSERT_TRUE(within_bound(p, left[x], right[y], out));
    }
}

TEST_P(CpuGemm, every_size_stays_within_the_stated_bound) {
  const std::array<std::array<int64_t, 3>, 18> sizes{{{1, 1, 1},
                                                      {2, 3, 15},
                                                      {3, 16, 16},
                                                      {5, 17, 17},
                                                      {7, 31, 33},
                                                      {12, 32, 127},
                                                      {13, 33, 128},
                                                      {23, 65, 129},
                                                      {24, 64, 255},
                                                      {31, 1, 256},
                                                      {1, 70, 257},
                                                      {400, 40, 31},
                                                      {17, 530, 65},
                                                      {97, 129, 300},
                                                      {4, 4, 1031},
                                                      {0, 5, 7},
                                                      {5, 0, 7},
                                                      {0, 0, 0}}};
  for (const char* spec : {"fp8_row", "fp8_block", "fp8_block:128x128", "mxfp8:swizzled", "mxfp4", "nvfp4:row_scaled",
                           "fp8_row:interleaved", "mxfp8:interleaved", "mxfp4:interleaved", "nvfp4:interleaved"})
    for (const auto& [m, n, k] : sizes)
      for (const Direction d : kDirections) {
        const RandomOperand a(spec, d, {m, k}, 5), b(spec, Direction::rowwise, {n, k}, 6);
        Output out(m, n, DType::f32);
        const GemmProblem p = problem(a, b, out);
        if (!multiply(p)) continue;
        ASSERT_TRUE(within_bound(p, a, b, out));
      }
}

TEST_P(CpuGemm, every_number_of_rows_stays_within_the_stated_bound) {
  const int64_t most = 40, n = 37, k = 272;
  for (const char* spec : {"fp8_row", "fp8_row:interleaved", "fp8_block:128x128:interleaved", "mxfp8:interleaved",
                           "mxfp4:interleaved", "nvfp4:interleaved"}) {
    const RandomOperand a(spec, Direction::rowwise, {most, k}, 7), b(spec, Direction::rowwise, {n, k}, 8);
    for (int64_t m = 1; m <= most; ++m) {
      Output out(m, n, DType::f32);
      GemmProblem p = problem(a, b, out);
      p.a.outer = m;  // where the first rows lie does not depend on how many follow
      if (!multiply(p)) continue;
      ASSERT_TRUE(within_bound(p, a, b, out));
    }
  }
}

/// What bias and addend make of a float32 product: the bias before the one rounding, the addend after it (0.18, 7.4).
float finished(float y, const GemmProblem& p, int64_t j, float addend) {
  uint32_t memory = 0;
  if (p.bias) y += load_element(p.bias, p.bias_dtype, j);
  store_element(&memory, p.out.dtype, 0, y);
  if (p.addend) store_element(&memory, p.out.dtype, 0, load_element(&memory, p.out.dtype, 0) + addend);
  return load_element(&memory, p.out.dtype, 0);
}

TEST_P(CpuGemm, bias_addend_and_rounding_follow_the_product_in_the_order_of_the_contract) {
  const int64_t m = 15, n = 45, k = 80;
  const RandomOperand a(spec("mxfp8", "mxfp4"), Direction::rowwise, {m, k}, 7),
      b(GetParam().shortest_block > 16 ? "mxfp4" : "nvfp4", Direction::columnwise, {n, k}, 8);
  Output product(m, n, DType::f32);
  multiply(problem(a, b, product));
  for (const DType dtype : kFloatTypes)
    for (const DType bias_dtype : kFloatTypes)
      for (const unsigned parts : {0u, 1u, 2u, 3u, 6u, 7u}) {  // 1: bias, 2: addend, 4: the addend is the output
        const Input bias({1, n}, bias_dtype, Kind::normal, 9), added({m, n, 3}, dtype, Kind::normal, 10);
        const auto* from = static_cast<const uint8_t*>(Matrix(added).data);
        Output out(m, n, dtype);
        GemmProblem p = problem(a, b, out);
        p.bias_dtype = bias_dtype;
        if (parts & 1u) p.bias = Matrix(bias).data;
        if (parts & 2u) p.addend = parts & 4u ? out.memory.data() : from;
        const int64_t stride = out.stride * size_of(dtype), width = n * size_of(dtype);
        for (int64_t i = 0; i < m && parts & 4u; ++i)
          std::memcpy(out.memory.as<uint8_t>() + i * stride, from + i * stride, static_cast<size_t>(width));
        multiply(p);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j)
            ASSERT_EQ(out.at(i, j), finished(product.at(i, j), p, j, load_element(from, dtype, i * out.stride + j)))
                << to_string(p) << ' ' << parts << " at " << i << ", " << j;
        EXPECT_TRUE(out.intact());
      }
}

TEST_P(CpuGemm, no_contraction_leaves_bias_and_addend) {
  for (const char* spec : {"fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    const RandomOperand a(spec, Direction::rowwise, {3, 0}, 1), b(spec, Direction::rowwise, {20, 0}, 2);
    const Input bias({1, 20}, DType::bf16, Kind::normal, 3), added({3, 20, 3}, DType::f32, Kind::normal, 4);
    Output out(3, 20, DType::f32);
    GemmProblem p = problem(a, b, out);
    p.bias = Matrix(bias).data, p.bias_dtype = DType::bf16, p.addend = Matrix(added).data;
    if (!multiply(p)) continue;
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t j = 0; j < 20; ++j)
        EXPECT_EQ(out.at(i, j), load_element(p.bias, DType::bf16, j) + load_element(p.addend, DType::f32, i * 23 + j));
    EXPECT_TRUE(out.intact());
  }
}

TEST_P(CpuGemm, block_sums_of_four_bit_codes_are_exact_and_the_global_factor_is_applied_in_order) {
  for (const char* spec : {"mxfp4", "nvfp4", "nvfp4:4over6=mae:256", "nvfp4:row_scaled:4over6=mse:256"}) {
    const int64_t k = QuantSpec::parse(spec).row().block, m = 33, n = 40;
    const RandomOperand a(spec, Direction::rowwise, {m, k}, 11), b(spec, Direction::columnwise, {n, k}, 12);
    Output out(m, n, DType::f32);
    const GemmProblem p = problem(a, b, out);
    if (!multiply(p)) continue;
    const bool global = a.operand.spec.row().has_amax;
    const float e = 6 * a.operand.spec.block_scale_max(), constant = global ? 1.0f / (e * e) : 1.0f;
    const auto amax = [&](const Operand& o, int64_t i) { return global ? o.amax[o.spec.row_scaled ? i : 0] : 1.0f; };
    const auto part = [&](const RandomOperand& o, int64_t i, double value) {  // value without the global amax: exact
      return std::nearbyint(value / static_cast<double>(amax(o.operand, i)) * (global ? static_cast<double>(e) : 1) *
                            0x1p24) *
             0x1p-24;
    };
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t l = 0; l < k; ++l)
          sum += part(a, i, a.values[static_cast<size_t>(i * k + l)]) *
                 part(b, j, b.values[static_cast<size_t>(j * k + l)]);
        const float exact = static_cast<float>(sum);
        ASSERT_EQ(static_cast<double>(exact), sum) << "the test's own sum does not fit";
        ASSERT_EQ(out.at(i, j), exact * constant * amax(a.operand, i) * amax(b.operand, j))
            << spec << ' ' << i << ' ' << j;
      }
  }
}

TEST_P(CpuGemm, whatever_multiplies_int8_gives_the_same_bits) {
  if (GetParam().formats != Takes::four_bits) GTEST_SKIP() << "not of int8";
  for (const int64_t m : {1, 31, 32, 33, 70})
    for (const char* spec : {"mxfp4", "nvfp4", "nvfp4:interleaved"}) {
      const int64_t n = 75, k = 1104;  // three slabs, the last of them short
      const RandomOperand a(spec, Direction::rowwise, {m, k}, 21), b(spec, Direction::columnwise, {n, k}, 22);
      Output ours(m, n, DType::f32), first(m, n, DType::f32);
      ASSERT_TRUE(multiply(problem(a, b, ours)));
      for (const Kernel& other : kernels())
        if (other.formats == Takes::four_bits && other.name != GetParam().name) {
          other.run(problem(a, b, first));
          for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < n; ++j)
              ASSERT_EQ(std::bit_cast<uint32_t>(ours.at(i, j)), std::bit_cast<uint32_t>(first.at(i, j)))
                  << spec << ", " << other.name << " at " << i << ", " << j;
        }
    }
}

#if defined(__x86_64__)
TEST_P(CpuGemm, tiles_give_the_bits_of_tiles_in_plain) {
  const std::string& name = GetParam().name;
  const bool nvfp4 = name == "avx512_amx_by_tiles_nvfp4";
  if (!nvfp4 && name != "avx512_amx_by_tiles") GTEST_SKIP() << "not tiles of bfloat16";
  for (const int64_t m : {1, 5, 16, 17, 70})
    for (const char* text :
         {"fp8_tensor", "fp8_block:interleaved", "mxfp8:interleaved", "nvfp4", "nvfp4:interleaved"}) {
      const int64_t n = 75, k = 1104;
      const RandomOperand a(text, Direction::rowwise, {m, k}, 23), b(text, Direction::rowwise, {n, k}, 24);
      Output ours(m, n, DType::f32), plain(m, n, DType::f32);
      if (!multiply(problem(a, b, ours))) continue;
      (nvfp4 ? cpu::amx_in_plain::kNvfp4 : cpu::amx_in_plain::kBf16)(problem(a, b, plain));
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) ASSERT_EQ(ours.at(i, j), plain.at(i, j)) << text << " at " << i << ", " << j;
    }
}
#endif

TEST_P(CpuGemm, a_code_that_is_not_a_number_reaches_exactly_the_outputs_that_it_feeds) {
  for (const char* spec : {"fp8_tensor", "fp8_tensor:e5m2", "fp8_block", "mxfp8", "mxfp8:e5m2",
                           "fp8_tensor:e5m2:interleaved", "mxfp8:interleaved", "mxfp8:e5m2:interleaved"})
    for (const Direction d : kDirections)
      for (const int64_t m : {15, 40}) {
        const int64_t n = 50, k = d == Direction::rowwise ? 24 : 32;
        const RandomOperand a(spec, d, {m, k}, 13, false), b(spec, d, {n, k}, 14, false);
        Output out(m, n, DType::f32);
        if (!multiply(problem(a, b, out))) continue;
        int64_t nans = 0, others = 0;
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j) {
            const double want = expected_at(a, b, i, j).product;
            ASSERT_EQ(std::isnan(out.at(i, j)), std::isnan(want)) << spec << ' ' << i << ' ' << j;
            if (std::isinf(want)) {
              ASSERT_EQ(static_cast<double>(out.at(i, j)), want);
            }
            ++(std::isnan(want) ? nans : others);
          }
        EXPECT_GT(nans, 0);
        EXPECT_GT(others, 0);
      }
}

/// Contractions of 2, 10 and 20 blocks of 32: scales are looked at 8 and 16 at a time.
constexpr int64_t kContractions[] = {64, 320, 640};

TEST_P(CpuGemm, lines_of_extreme_scales_keep_the_bound_and_leave_their_neighbours_bits) {
  const char* text = spec("mxfp8", "mxfp4");
  for (const Direction d : kDirections)
    for (const auto& [m, k] : {std::array<int64_t, 2>{29, 64}, {29, 320}, {29, 640}, {14, 320}}) {
      const int64_t n = 70;
      RandomOperand a(text, d, {m, k}, 21), b(text, d, {n, k}, 22);
      Output before(m, n, DType::f32), after(m, n, DType::f32);
      ASSERT_TRUE(multiply(problem(a, b, before)));
      const auto set_scale = [&](RandomOperand& o, int64_t line, int64_t l, uint8_t byte) {
        o.memory.side(d).scale.as<uint8_t>()[o.scale_place(line, l)] = byte;
        o.decode_values();
      };
      set_scale(a, 7, 0, 70), set_scale(a, 13, k - 1, 178), set_scale(b, 33, k - 1, 180), set_scale(b, 69, 33, 60);
      const GemmProblem p = problem(a, b, after);
      multiply(p);
      ASSERT_TRUE(within_bound(p, a, b, after));
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j)
          if (i != 7 && i != 13 && j != 33 && j != 69) {
            ASSERT_EQ(before.at(i, j), after.at(i, j)) << i << ", " << j;
          }
    }
}

void expect_nan_scales_to_reach_their_lines(const char* spec, Direction d, int64_t k, const auto& multiply) {
  RandomOperand a(spec, d, {30, k}, 15), b(spec, d, {20, k}, 16);
  const uint8_t nan = a.operand.spec.row().scale == ScaleKind::e8m0 ? 0xFF : 0x7F;
  a.memory.side(d).scale.as<uint8_t>()[a.scale_place(13, 40)] = nan;
  b.memory.side(d).scale.as<uint8_t>()[b.scale_place(18, k - 1)] = nan;
  Output out(30, 20, DType::f32);
  if (!multiply(problem(a, b, out))) return;
  for (int64_t i = 0; i < 30; ++i)
    for (int64_t j = 0; j < 20; ++j) EXPECT_EQ(std::isnan(out.at(i, j)), i == 13 || j == 18) << spec << ", k = " << k;
}

TEST_P(CpuGemm, a_scale_that_is_not_a_number_reaches_its_line) {
  for (const char* spec :
       {"mxfp8", "mxfp8:swizzled", "mxfp4", "nvfp4", "mxfp8:interleaved", "mxfp4:interleaved", "nvfp4:interleaved"})
    for (const Direction d : kDirections)
      for (const int64_t k : kContractions)
        expect_nan_scales_to_reach_their_lines(spec, d, k, [&](const GemmProblem& p) { return multiply(p); });
}

/// Chunks of 1, 2, 3 ... items, taken by three threads.
void run_in_odd_chunks(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  std::vector<std::array<int64_t, 2>> chunks;
  for (int64_t begin = 0, size = 1; begin < count; begin += size++)
    chunks.push_back({begin, std::min(begin + size, count)});
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (size_t i = next++; i < chunks.size(); i = next++) body(chunks[i][0], chunks[i][1]);
    });
  for (std::thread& t : threads) t.join();
}

TEST_P(CpuGemm, bits_do_not_depend_on_threads_chunks_or_the_product_around_an_output) {
  const int64_t m = 800, n = 1100, k = 300;
  const char* text = spec("mxfp8", "mxfp4");
  const RandomOperand a(text, Direction::rowwise, {m, k}, 17), b(text, Direction::rowwise, {n, k}, 18);
  Output serial(m, n, DType::f32, 0), threaded(m, n, DType::f32, 0);
  multiply(problem(a, b, serial));
  const Executor before = set_executor(run_in_odd_chunks);
  multiply(problem(a, b, threaded));
  set_executor(before);
  EXPECT_EQ(difference(serial.memory, threaded.memory), "");
  const auto last_lines = [&](Operand o, int64_t count) {
    o.data = static_cast<const uint8_t*>(o.data) + (o.outer - count) * (o.spec.packed() ? k / 2 : k);
    o.scale = static_cast<const uint8_t*>(o.scale) + (o.outer - count) * block_count(o.spec, k);
    o.outer = count;
    return o;
  };
  for (const int64_t rows : {5, 11, 14, 16}) {
    Output corner(rows, 30, DType::f32, 0);
    GemmProblem p = problem(a, b, corner);
    p.a = last_lines(p.a, rows), p.b = last_lines(p.b, 30);
    multiply(p);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < 30; ++j) ASSERT_EQ(corner.at(i, j), serial.at(m - rows + i, n - 30 + j));
  }
}

TEST_P(CpuGemm, column_sums_add_128_rows_at_a_time_in_order_and_round_once) {
  for (const DType in : kFloatTypes)
    for (const DType to : kFloatTypes)
      for (const auto& [rows, cols] :
           {std::array<int64_t, 2>{0, 5}, {1, 1}, {127, 19}, {128, 256}, {300, 257}, {1000, 600}, {3, 0}}) {
        const Input x({rows, cols, 5, 1}, in, Kind::normal, 19);
        const Matrix view = x;
        Guarded out(cols * size_of(to)), threaded(cols * size_of(to));
        GetParam().others->column_sum({view, out.data(), to});
        const Executor before = set_executor(run_in_odd_chunks);
        GetParam().others->column_sum({view, threaded.data(), to});
        set_executor(before);
        for (int64_t j = 0; j < cols; ++j) {
          float total = 0, part = 0;
          for (int64_t i = 0; i < rows; ++i) {
            part += load_element(view.data, in, i * view.row_stride + j);
            if (i % 128 == 127 || i == rows - 1) total += part, part = 0;
          }
          float want;
          store_element(&want, to, 0, total);
          ASSERT_EQ(load_element(out.data(), to, j), load_element(&want, to, 0)) << rows << ' ' << cols << ' ' << j;
        }
        EXPECT_TRUE(out.intact());
        EXPECT_EQ(difference(out, threaded), "");
      }
}

}  // namespace
}  // namespace quire::testing
