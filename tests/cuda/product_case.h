// Products on the CUDA device: operands that the CPU has quantized, outputs with gaps between their rows, and what the
// contract says of each output.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cuda/twins.h"
#include "quire/cpu/groups/layout.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "quire/operations/operations.h"
#include "quire/reference/gemm.h"
#include "quire/spec/scale.h"
#include "quire/spec/scale_index.h"

namespace quire::testing {

inline constexpr Direction kRows = Direction::rowwise, kColumns = Direction::columnwise;
inline constexpr std::array kDTypes{DType::f32, DType::f16, DType::bf16};

struct Shape3 {
  int64_t m, n, k;
};
/// Tokens, outputs and inputs of a Linear.
inline constexpr std::array kShapes{Shape3{5, 7, 33},  Shape3{1, 40, 130}, Shape3{17, 3, 64}, Shape3{33, 18, 272},
                                    Shape3{3, 5, 300}, Shape3{4, 6, 1},    Shape3{2, 3, 0},   Shape3{0, 3, 5},
                                    Shape3{3, 0, 16},  Shape3{70, 66, 20}};

inline constexpr int64_t kTokens = 37, kInputs = 48, kOutputs = 21;

struct Grouping {
  const char* what;
  std::vector<int64_t> ends;
  bool wide = false;
};
inline const std::vector<Grouping>& groupings() {
  static const std::vector<Grouping> all{{"balanced", {10, 19, 28, 37}, false},
                                         {"unbalanced, wide ends, rows of none", {1, 30, 34}, true},
                                         {"with empty ones", {0, 16, 16, 35, 35}, false},
                                         {"all empty", {0, 0, 0}, true},
                                         {"one", {20}, false}};
  return all;
}

/// The rows of a product that has fewer of them are the first ones of another product, in float32.
inline void expect_first_rows(const MutableMatrix& some, const MutableMatrix& all) {
  for (int64_t i = 0; i < some.rows; ++i)
    for (int64_t j = 0; j < some.cols; ++j)
      ASSERT_EQ(load_element(some.data, DType::f32, i * some.row_stride + j),
                load_element(all.data, DType::f32, i * all.row_stride + j))
          << "at " << i << ", " << j;
}

/// One number of an operand, and what 7.4 multiplies it by: read apart from the code under test.
struct OperandReader {
  const Operand& o;

  float code(int64_t outer, int64_t l) const {
    const int64_t at = data_index({o.spec, o.direction, o.outer, o.contraction}, outer, l);
    return decode(o.spec.element, static_cast<int>(code_at(o.spec, static_cast<const uint8_t*>(o.data), at)));
  }
  bool in_blocks() const { return o.spec.row().block != 0; }
  int64_t cut() const { return in_blocks() ? o.spec.row().block : 128; }
  float stored(int64_t outer, int64_t l) const {
    const int64_t block = in_blocks() ? o.spec.row().block : o.contraction;
    const int64_t blocks = in_blocks() ? ceil_div(o.contraction, block) : 1;
    const int64_t at = scale_index({o.spec, o.direction, o.outer, blocks}, outer, l / block);
    if (o.spec.row().scale == ScaleKind::f32) return static_cast<const float*>(o.scale)[at];
    const uint8_t byte = static_cast<const uint8_t*>(o.scale)[at];
    return o.spec.row().scale == ScaleKind::e8m0 ? e8m0_value(byte) : decode(Format::e4m3, byte);
  }
  float block_scale(int64_t outer, int64_t l) const { return in_blocks() ? stored(outer, l) : 1.0f; }
  float line_factor(int64_t outer) const {
    if (!in_blocks()) return stored(outer, 0);
    if (o.spec.row().scale != ScaleKind::two_level) return 1.0f;
    const float number = o.amax[o.spec.row_scaled ? outer : 0];
    return o.spec.global == Global::divisor ? 1.0f / number : number;
  }
  float divisor() const {
    if (o.spec.row().scale != ScaleKind::two_level || o.spec.global != Global::amax) return 1.0f;
    return o.spec.block_scale_max_256 ? 6.0f * 256 : 6.0f * 448;
  }
  /// The number itself, up to the rounding of double.
  double value(int64_t outer, int64_t l) const {
    const double code_and_scale = static_cast<double>(code(outer, l)) * static_cast<double>(block_scale(outer, l));
    if (o.spec.global == Global::divisor)
      return code_and_scale / static_cast<double>(o.amax[amax_index(o.spec, outer)]);
    return code_and_scale * static_cast<double>(line_factor(outer)) / static_cast<double>(divisor());
  }
};

/// The sum of numerics.md 7.4 in float32, in its order, before bias.
inline float contracted(const Operand& a, const Operand& b, int64_t i, int64_t j) {
  if (a.contraction == 0) return 0;
  const OperandReader x{a}, y{b};
  const int64_t cut = std::min(x.cut(), y.cut());
  float sum = 0;
  for (int64_t begin = 0; begin < a.contraction; begin += cut) {
    volatile float part = 0;  // rounded to float32 after every step
    for (int64_t l = begin; l < std::min(begin + cut, a.contraction); ++l) {
      const volatile float product = x.code(i, l) * y.code(j, l);
      part = part + product;
    }
    const volatile float once = part * x.block_scale(i, begin), twice = once * y.block_scale(j, begin);
    sum = sum + twice;
  }
  const volatile float constant = 1.0f / (x.divisor() * y.divisor());
  const volatile float first = sum * constant, second = first * x.line_factor(i);
  return second * y.line_factor(j);
}

/// Where the memory of a product begins and what is in it.
struct Output {
  MutableMatrix out;
  std::vector<MutableMatrix> each{};
  int64_t bytes = 0;
};

/// Calls check(limits, number, its place) for the numbers of an output that have limits. All others are as in `rest`,
/// what the output's memory must be beside them. Ends with the first one that is not.
template <class Limits, class Check>
void each_number(const Output& o, const std::map<const char*, Limits>& limits, const std::string& rest,
                 const Check& check) {
  const auto* const begin = static_cast<const char*>(o.out.data);
  const int64_t width = size_of(o.out.dtype);
  for (int64_t at = 0; at < o.bytes && !::testing::Test::HasFatalFailure(); at += width) {
    if (const auto found = limits.find(begin + at); found != limits.end())
      check(found->second, static_cast<double>(load_element(begin + at, o.out.dtype, 0)), at / width);
    else
      ASSERT_EQ(std::memcmp(begin + at, &rest[static_cast<size_t>(at)], static_cast<size_t>(width)), 0)
          << "at " << at / width << ", beside the products";
  }
}

class ProductCases {
 public:
  explicit ProductCases(uint64_t seed) : dice_(seed) {}

  uint64_t die(uint64_t n) { return dice_() % n; }
  Twins& twins() { return twins_; }
  void clear() { twins_.device.clear(); }

  /// Numbers of a kind: 0 normal, 1 of many magnitudes, 2 with some that are not finite, 3 halves of small integers, 4
  /// zeros.
  Matrix matrix(DType dtype, int64_t rows, int64_t cols, uint64_t kind = 0) {
    const int64_t stride = cols + static_cast<int64_t>(die(3));
    const int64_t count = rows == 0 ? 0 : (rows - 1) * stride + cols;
    auto* const data = twins_.room<std::byte>(count * size_of(dtype));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) store_element(data, dtype, i * stride + j, draw(kind));
    return {data, dtype, rows, cols, stride};
  }
  /// Rows that begin at multiples of 16 bytes, where they have as many or `more` numbers.
  Matrix aligned(DType dtype, int64_t rows, int64_t cols, int64_t more = 0) {
    const int64_t stride = cols + more;
    auto* const data = twins_.room<std::byte>(rows * stride * size_of(dtype));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < stride; ++j) store_element(data, dtype, i * stride + j, j < cols ? draw(0) : NAN);
    return {data, dtype, rows, cols, stride};
  }
  Vector vector(DType dtype, int64_t count) { return {matrix(dtype, 1, count).data, dtype}; }

  /// `rows` rows of the quantized tensor, and `cols` columns.
  Operand operand(const std::string& spec, Direction d, int64_t rows, int64_t cols, RowGroups groups = {}) {
    QuantizeProblem q;
    q.spec = QuantSpec::parse(spec), q.x = matrix(DType::f32, rows, cols, numbers);
    const bool one = is_one(groups), rowwise = d == Direction::rowwise;
    const BufferCounts<int64_t> count = one ? counts(buffers<int64_t>(q.spec, {rows, cols}, d))
                                            : grouped_counts<int64_t>(q.spec, {rows, cols, groups.count}, d);
    Side& side = rowwise ? q.rowwise : q.columnwise;
    side = {twins_.room<std::byte>(count[0]), twins_.room<std::byte>(count[1] * (has_byte_scales(q.spec) ? 1 : 4)),
            twins_.room<float>(count[2])};
    (rowwise ? q.room.rowwise : q.room.columnwise) = count;
    const std::vector<float> given(static_cast<size_t>(groups.count), 0.25f);
    if (q.spec.given) q.scale = given.data();
    q.random.seed = die(1000);
    q.groups = groups;
    quantize(q);
    return {.spec = q.spec,
            .direction = d,
            .outer = rowwise ? rows : cols,
            .contraction = rowwise ? cols
                           : one   ? columnwise_tokens(q.spec, rows)
                                   : rows,
            .data = side.data,
            .scale = side.scale,
            .amax = side.amax,
            .groups = groups,
            .room = count,
            .what = "gemm: an operand"};
  }

  RowGroups groups(const std::vector<int64_t>& ends, int64_t rows, bool wide = false) {
    const auto count = std::ssize(ends);
    const void* const data = wide ? static_cast<const void*>(twins_.array(ends))
                                  : twins_.array(std::vector<int32_t>(ends.begin(), ends.end()));
    return {.count = count, .rows = rows, .ends = {data, count, wide}, .what = "grouped_linear"};
  }

  /// An output of numbers, with gaps between rows; `lists`: one for each of so many groups.
  Output output(DType dtype, int64_t rows, int64_t cols, int64_t lists = 0) {
    const int64_t stride = cols + static_cast<int64_t>(die(4)), bytes = rows * stride * size_of(dtype);
    auto* const data = twins_.room<std::byte>(bytes);
    for (int64_t i = 0; i < rows * stride; ++i) store_element(data, dtype, i, draw(0));
    Output o{{data, dtype, rows, cols, stride}, {}, bytes};
    for (int64_t e = 0; e < lists; ++e)
      o.each.push_back({data + e * (rows / lists) * stride * size_of(dtype), dtype, rows / lists, cols, stride});
    return o;
  }

  /// Runs a row of the device. Its bytes must be those that `expected` writes, where any NaN is any NaN.
  template <class Problem, class Expected>
  void expect_bits(const Problem& p, const Output& o, std::string_view row, const Expected& expected) {
    SCOPED_TRACE(text(to_string(p), " to ", name(p.out.dtype), " by ", row));
    const auto* const begin = static_cast<const char*>(o.out.data);
    const std::string before(begin, static_cast<size_t>(o.bytes));
    expected();
    const std::string wanted(begin, static_cast<size_t>(o.bytes));
    std::memcpy(o.out.data, before.data(), before.size());
    run(p, row);
    compared += o.out.rows * o.out.cols;
    for (int64_t at = 0; at < o.bytes; at += size_of(o.out.dtype)) {
      const float found = load_element(begin + at, o.out.dtype, 0),
                  value = load_element(&wanted[static_cast<size_t>(at)], o.out.dtype, 0);
      if (std::isnan(found) && std::isnan(value)) continue;
      ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(value))
          << found << " instead of " << value << ", element " << at / size_of(o.out.dtype) << " of rows of "
          << o.out.row_stride;
    }
  }

  template <class Problem>
  void run(const Problem& p, std::string_view row) {
    for (const KernelRow<Problem>& r : kernels<Problem>(twins_.device)) {
      if (r.name != row) continue;
      Refusal refusal;
      ASSERT_TRUE(r.takes(p, twins_.device, &refusal)) << refusal.why;
      try {
        r.run(p, twins_.device);
      } catch (const emulator::Error& e) {
        ADD_FAILURE() << e.what();
      }
      twins_.device.synchronize();
      return;
    }
    ADD_FAILURE() << "there is no row " << row;
  }

  uint64_t numbers = 0;  ///< the kind of those of operands
  int64_t compared = 0;

 private:
  float draw(uint64_t kind) {
    const float normal = std::normal_distribution<float>()(dice_);
    constexpr std::array special{NAN, INFINITY, -INFINITY, -0.0f, 0x1p-149f};
    switch (kind) {
      case 1:
        return std::ldexp(normal, static_cast<int>(die(40)) - 20);
      case 2:
        return die(40) == 0 ? special[die(special.size())] : normal;
      case 3:
        return static_cast<float>(static_cast<int>(die(13)) - 6) / 2;
      case 4:
        return 0;
      default:
        return normal;
    }
  }

  Twins twins_;
  std::mt19937_64 dice_;
};

/// The product of each group by `one`, and the zeros beside them, as numerics.md 0.19 says.
template <class One>
void each_group_by(const GemmProblem& p, const One& one) {
  if (!p.in_groups()) return one(p);
  cpu::ListMemory memory;
  const cpu::CutOperand a(p.a, memory), b(p.b, memory);
  const bool by_rows = p.a.direction == Direction::rowwise;
  const auto zero_unless_added = [&](const MutableMatrix& m) {
    if (!p.addend) cpu::zero(m);
  };
  for (size_t e = 0; e < a.ends().size(); ++e) {
    const int64_t rows = a.ends().rows(e), first = by_rows ? a.ends().begin(e) : static_cast<int64_t>(e) * p.a.outer;
    const MutableMatrix out = cpu::matrix_of<MutableMatrix>(p.out, p.outs, e, {first, by_rows ? rows : p.a.outer});
    if (rows == 0) {
      if (!by_rows) zero_unless_added(out);
      continue;
    }
    GemmProblem q{
        .a = a[e], .b = b[e], .out = out, .bias_dtype = p.bias_dtype, .addend = p.addend ? out.data : nullptr};
    if (p.bias)
      q.bias = static_cast<const char*>(p.bias) + static_cast<int64_t>(e) * p.out.cols * size_of(p.bias_dtype);
    if (!p.biases.empty()) q.bias = p.biases[e].data, q.bias_dtype = p.biases[e].dtype;
    one(q);
  }
  if (by_rows && p.outs.empty() && !p.addend) cpu::zero_beyond(p.out, a.ends());
}

/// One product of the contract in float32.
inline void contract(const GemmProblem& p) {
  for (int64_t i = 0; i < p.out.rows; ++i)
    for (int64_t j = 0; j < p.out.cols; ++j) {
      volatile float y = contracted(p.a, p.b, i, j);
      if (p.bias) y = y + load_element(p.bias, p.bias_dtype, j);
      const int64_t at = i * p.out.row_stride + j;
      const float addend = p.addend ? load_element(p.addend, p.out.dtype, at) : 0.0f;
      store_element(p.out.data, p.out.dtype, at, y);
      if (!p.addend) continue;
      store_element(p.out.data, p.out.dtype, at, load_element(p.out.data, p.out.dtype, at) + addend);
    }
}

}  // namespace quire::testing
