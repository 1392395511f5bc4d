// What is asked of a kernel: plain structs of views and specs, printable in errors and in explain(). Whatever lives in
// a tensor is a pointer, which kernels alone follow: it is memory of the device they run on. kOp: the name of the
// operation in errors and in QUIRE_KERNEL.
//
// Groups. A problem may be one of groups of rows (RowGroups), such as the tokens of each expert: for each group what
// the problem of one tensor asks (numerics.md 0.19). A kernel takes one tensor, equal groups and ends. Rows that belong
// to no group are zero in results, and so is what no group writes of flat buffers, so that a call always gives the same
// bytes. in_groups(): whether there is more than one tensor.
//
// Lists. A std::span of a problem is an array of the host, whose members have pointers to the device's memory. It is
// there until the kernel's `run` returns, which may be before the kernel has run: a kernel takes what it needs of a
// list into the parameters of its launches (several launches where one has not room for all), and keeps no pointer to
// it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "quire/base/matrix.h"
#include "quire/spec/groups.h"
#include "quire/spec/quant_spec.h"

namespace quire {

/// Memory of one direction's buffers, laid out as buffers() says. data == nullptr: this direction is absent.
struct Side {
  void* data = nullptr;
  void* scale = nullptr;
  float* amax = nullptr;

  /// A side of an empty tensor has no codes and may have no memory for them, but its scale and amax are still written:
  /// the same side, with data that is not null if anything is there.
  constexpr Side with_sentinel_data() const { return {data ? data : scale ? scale : amax, scale, amax}; }
};

/// Where stochastic rounding takes its bits (numerics.md 0.11): Philox of seed and offset. The offsets of the two
/// directions are separate so that a gradient's two roundings are independent.
struct Randomness {
  uint64_t seed = 0;
  uint64_t rowwise_offset = 0;
  uint64_t columnwise_offset = 0;
  /// {seed, counter c} of a module or null: its seed and 2 c are added to the numbers above.
  const int64_t* state = nullptr;
  /// {index, count, ends} or null: x is that one of `count` equal parts of a larger tensor, along `axis`, and draws the
  /// bits that it would draw there (numerics.md 0.11). ends: `cuts` numbers, where x is cut into pieces, each of which
  /// is a part of a piece of the larger tensor.
  const int64_t* part = nullptr;
  int axis = 0;  ///< 0: parts of the rows, 1: of the columns
  int64_t cuts = 0;
  int64_t index = 0, count = 1;
  const int64_t* ends = nullptr;

  /// The numbers to draw with. Follows pointers: for kernels.
  constexpr Randomness read() const {
    Randomness r = *this;
    r.state = r.part = nullptr;
    if (state) {
      const uint64_t drawn = 2 * static_cast<uint64_t>(state[1]);
      r.seed += static_cast<uint64_t>(state[0]), r.rowwise_offset += drawn, r.columnwise_offset += drawn;
    }
    if (part) r.index = part[0], r.count = part[1], r.ends = part + 2;
    return r;
  }

  /// How far the numbers of a block and of the block below it in the same piece are apart, of lines of `blocks` in a
  /// buffer.
  constexpr int64_t stride(Direction d, int64_t blocks) const { return divides_lines(d) ? blocks : blocks * count; }
  /// The number of a block of a buffer of `lines` lines of `blocks` blocks.
  constexpr int64_t number(Direction d, std::array<int64_t, 2> lines_and_blocks, int64_t line, int64_t block) const {
    const auto [lines, blocks] = lines_and_blocks;
    if (divides_lines(d)) return in_whole(line, lines, 1) * blocks + block;
    return line * blocks * count + in_whole(block, blocks, kBlock);
  }

 private:
  static constexpr int64_t kBlock = 16;  ///< elements that draw together

  /// Where place `at` of `size` is in the larger tensor; unit: elements of a place.
  constexpr int64_t in_whole(int64_t at, int64_t size, int64_t unit) const {
    int64_t begin = 0, end = size;
    for (int64_t i = 0; i < cuts; ++i) {
      const int64_t cut = ends[i] / unit;
      if (at < cut) {
        end = cut;
        break;
      }
      begin = cut;
    }
    return begin * count + index * (end - begin) + at - begin;
  }
  constexpr bool divides_lines(Direction d) const { return (axis == 0) == (d == Direction::rowwise); }
};

/// Amaxes of each direction that a caller knows, as AmaxProblem gives them: not negative, not NaN. Null: measured.
struct GivenAmax {
  const float* rowwise = nullptr;
  const float* columnwise = nullptr;

  constexpr const float* of(Direction d) const { return d == Direction::rowwise ? rowwise : columnwise; }
};

/// Quantize x [M, K] (f32, f16, bf16; any size, any row stride) into the sides that are present: codes, scales and
/// amaxes (numerics.md 1-5). Their buffers are those of buffers(spec, {M, K}, direction), without overlap.
struct QuantizeProblem {
  static constexpr std::string_view kOp = "quantize";
  QuantSpec spec;
  Matrix x;
  Side rowwise, columnwise;
  Randomness random;
  /// Under the option `given`, which needs it: what is stored as the scale of the tensor, or in the amax buffer (2.5,
  /// 5.9). Else: multiplies before the cast instead of a scale derived from the amax (delayed scaling, 1.5);
  /// Scope::tensor only. The amax of Scope::tensor is still measured and stored.
  const float* scale = nullptr;
  /// Instead of x's own amaxes: calibrated (5.9), or reduced over parts of a larger tensor. Stored as the amaxes.
  GivenAmax amax{};
  const char* role =
      "";  ///< "x", "w", "dy", or "" where only the product that reads the codes will know; for observers
  /// Of x. Group e draws with seed + e and has scale[e]; the sides are flat buffers of all groups (groups.h).
  RowGroups groups{};
  std::span<const Matrix> each{};  ///< a matrix for each of equal groups, instead of x's memory
  Room room{};                     ///< of groups: of the sides
  RowGroups only{};                ///< with ends: groups that have no rows here are left out
  const char* what = "quantize: x";

  bool in_groups() const { return !is_one(groups) || only.ends.data || !each.empty(); }
};

/// What scales above the blocks follow from (numerics.md 1.2, 5.2): amax_count() numbers for each direction whose
/// pointer is not null, columnwise those of the transformed values. x: f32, f16 or bf16. A quantization that is given
/// them in `amax` has the bytes that it has without. Of groups: grouped_amax_count() numbers, 0 where there are no
/// rows. No spec whose scales follow from blocks alone.
struct AmaxProblem {
  static constexpr std::string_view kOp = "amax";
  QuantSpec spec;
  Matrix x;
  float* rowwise = nullptr;
  float* columnwise = nullptr;
  RowGroups groups{};

  bool in_groups() const { return !is_one(groups); }
};

/// Decode one direction into `out` (f32, f16, bf16; rounded once, to nearest even): rowwise [M, K]; columnwise [K, L]
/// with L = columnwise_tokens(M), before any inverse transform.
struct DequantizeProblem {
  static constexpr std::string_view kOp = "dequantize";
  QuantSpec spec;
  Direction direction = Direction::rowwise;
  int64_t rows = 0, cols = 0;  ///< M, K of the logical tensor
  const void* data = nullptr;
  const void* scale = nullptr;
  const float* amax = nullptr;
  MutableMatrix out;
  RowGroups groups{};               ///< of the rows; rowwise, in flat buffers
  BufferCounts<int64_t> room{};     ///< of groups
  const char* what = "dequantize";  ///< for errors

  bool in_groups() const { return !is_one(groups); }
};

/// One operand of a product, seen as [outer, contraction]: a rowwise side of [outer, contraction] or the columnwise
/// side of [contraction, outer]. Of groups of the rows of a quantized tensor: all rows of it, which are the outer ones
/// of a rowwise operand, and are contracted, group by group, by a columnwise one.
struct Operand {
  QuantSpec spec;
  Direction direction = Direction::rowwise;
  int64_t outer = 0, contraction = 0;
  const void* data = nullptr;
  const void* scale = nullptr;
  const float* amax = nullptr;
  RowGroups groups{};
  BufferCounts<int64_t> room{};     ///< of groups
  std::span<const Side> each{};     ///< a side for each group, instead of flat buffers
  const char* what = "an operand";  ///< for errors

  bool in_groups() const { return !is_one(groups) || !each.empty(); }
  /// Of the quantized tensor.
  int64_t rows() const { return direction == Direction::rowwise ? outer : contraction; }
  int64_t cols() const { return direction == Direction::rowwise ? contraction : outer; }
};

/// What `from` stores, codes and scales, in the order that its spec does not have: interleaved, or plain again
/// (numerics.md 2.4). Twice, bytes are what they were. Padding is zero. Amaxes are the same in both orders.
struct ReorderProblem {
  static constexpr std::string_view kOp = "reorder";
  Operand from;
  void* data = nullptr;  ///< as buffers() of from's spec in the other order says
  void* scale = nullptr;
};

/// A product of a Linear and the roles of its operands a and b (numerics.md 6.1), for observers.
struct GemmRole {
  const char* name = "";
  const char* a = "";
  const char* b = "";
};
inline constexpr GemmRole kFprop{"fprop", "x", "w"}, kDgrad{"dgrad", "dy", "w"}, kWgrad{"wgrad", "dy", "x"};

/// out[i, j] = sum_l a[i, l] * b[j, l] (+ bias[j]) (+ addend[i, j]), numerics.md 7.4. Exact products; sums in f32
/// within blocks of the scale's length (at most 128), block sums scaled and added in f32 (scales that are powers of two
/// may be multiplied into the codes instead, exactly, and then blocks are 128 long); bias added in f32 before the
/// one rounding to out's dtype; the addend is added after that rounding (7.4), in f32. With K the length of the
/// contraction,
///   |error before the output rounding| <= (K + 6) * 2^-24 * sum_l |a[i, l] * b[j, l]|,
/// and block sums of 4-bit elements are exact. The result does not depend on the number of threads. A contraction of
/// length 0 gives bias (+ addend).
///
/// Of groups: a product of each. Where a is rowwise, its groups are the rows of out, [a.outer, columns of a product];
/// where it is columnwise, the products are one after another, [E * a.outer, b.outer].
struct GemmProblem {
  static constexpr std::string_view kOp = "gemm";
  Operand a, b;
  MutableMatrix out;           ///< [a.outer, b.outer], f32, f16 or bf16
  const void* bias = nullptr;  ///< [b.outer] or null
  DType bias_dtype = DType::f32;
  /// Same shape, strides and dtype as out; may be out itself. Of groups: nothing else, or the memory of the first of
  /// `outs`.
  const void* addend = nullptr;
  GemmRole role{};
  std::span<const MutableMatrix> outs{};  ///< one for each group, instead of out's memory
  std::span<const Vector> biases{};       ///< one for each group; of `bias`, they are one after another

  bool in_groups() const { return a.in_groups() || b.in_groups() || !outs.empty() || !biases.empty(); }
};

/// out = a b + bias, of plain matrices: a [M, K], b [K, N], or transposed. Operands are rounded to out's dtype first;
/// the order of summation is that of the library that multiplies.
///
/// Of groups of the rows of a: a product of each. The matrices b are one after another, and groups are the rows of out;
/// where a is transposed, groups are rows of b too, and the products are one after another.
struct MatmulProblem {
  static constexpr std::string_view kOp = "matmul";
  Matrix a, b;
  bool transpose_a = false, transpose_b = false;
  Vector bias{};      ///< [N], or absent; of groups: one after another
  MutableMatrix out;  ///< [M, N], f32, f16 or bf16
  RowGroups groups{};
  std::optional<Operand> codes{};         ///< rowwise, of equal groups: decoded to out's dtype, they are b
  std::span<const Matrix> bs{};           ///< one for each group, instead of b's memory
  std::span<const MutableMatrix> outs{};  ///< the same of out
  std::span<const Vector> biases{};       ///< the same of bias

  bool in_groups() const { return !is_one(groups) || codes || !bs.empty() || !outs.empty() || !biases.empty(); }
};

/// out[j] = sum_i x[i, j] in f32, rounded once to out_dtype, for bias gradients (numerics.md 6.6). The order of the sum
/// is fixed: it does not depend on threads. Of groups: out[e, j], the sum over the rows of group e.
struct ColumnSumProblem {
  static constexpr std::string_view kOp = "column_sum";
  Matrix x;
  void* out = nullptr;
  DType out_dtype = DType::f32;
  RowGroups groups{};

  bool in_groups() const { return !is_one(groups); }
};

std::string to_string(const QuantizeProblem& p);
std::string to_string(const AmaxProblem& p);
std::string to_string(const DequantizeProblem& p);
std::string to_string(const ReorderProblem& p);
std::string to_string(const GemmProblem& p);
std::string to_string(const MatmulProblem& p);
std::string to_string(const ColumnSumProblem& p);

}  // namespace quire
