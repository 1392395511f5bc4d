#include <algorithm>
#include <optional>

#include "quire/cuda/gemm.h"
#include "quire/cuda/grouped.h"
#include "quire/cuda/quantize.h"
#include "quire/cuda/rows.h"
#include "quire/cuda/skinny.h"
#include "quire/device/library.h"

namespace quire::cuda {
namespace {

constinit const Kernel kMatmulAny{"gemm", "matmul_any"}, kTiles32{"plain_tiles32", "plain_tiles32"};
constinit const Kernel kBf16{"plain_tiles", "plain_bf16_64"}, kBf16Large{"plain_tiles", "plain_bf16_128"};
constinit const Kernel kF16{"plain_tiles", "plain_f16_64"}, kF16Large{"plain_tiles", "plain_f16_128"};

/// By the dtype, the columns of a tile, and which operands' rows are contracted: none, b's or both's.
constinit const std::array<std::array<std::array<Kernel, 3>, 2>, 2> kPipelined{
    {{{{{{"pipelined_bf16", "plain_bf16_128_along"},
         {"pipelined_bf16", "plain_bf16_128_across_b"},
         {"pipelined_bf16", "plain_bf16_128_across"}}},
       {{{"pipelined_bf16", "plain_bf16_256_along"},
         {"pipelined_bf16", "plain_bf16_256_across_b"},
         {"pipelined_bf16", "plain_bf16_256_across"}}}}},
     {{{{{"pipelined_f16", "plain_f16_128_along"},
         {"pipelined_f16", "plain_f16_128_across_b"},
         {"pipelined_f16", "plain_f16_128_across"}}},
       {{{"pipelined_f16", "plain_f16_256_along"},
         {"pipelined_f16", "plain_f16_256_across_b"},
         {"pipelined_f16", "plain_f16_256_across"}}}}}}};

/// By the dtype, and the bits of an element of the columns: codes of 4 or 8, or 16.
constinit const std::array<std::array<Kernel, 3>, 2> kFewRows{{{{{"plain_few_rows", "plain_few_bf16_4"},
                                                                 {"plain_few_rows", "plain_few_bf16_8"},
                                                                 {"plain_few_rows", "plain_few_bf16_16"}}},
                                                               {{{"plain_few_rows", "plain_few_f16_4"},
                                                                 {"plain_few_rows", "plain_few_f16_8"},
                                                                 {"plain_few_rows", "plain_few_f16_16"}}}}};

MatmulJob job_of(const MatmulProblem& p, const Context& context) {
  MatmulJob job{.a = p.a,
                .b = p.b,
                .bs = list_on_device(p.bs, context),
                .has_codes = p.codes.has_value(),
                .transpose_a = p.transpose_a,
                .transpose_b = p.transpose_b,
                .groups = place_groups(p.groups, p.a.rows, context),
                .out = on_device(p, p.bias, context)};
  job.out.by_rows = !p.transpose_a;
  if (p.codes) job.codes = on_device(*p.codes, context);
  if (job.out.by_rows && p.outs.empty()) zero_beyond(p.out, job.groups, context);
  return job;
}

void matmul_reference(const MatmulProblem& p, const Context& context) {
  launch(kMatmulAny, with_groups(grid_of(p.out.rows * p.out.cols), p.groups.count), job_of(p, context), context);
}

bool refuses_library(const MatmulProblem& p, const Context&, Refusal* refusal) {
  if (!matmul_in_use()) return refused_here(refusal, "no library is lent to multiply plain matrices (set_matmul)");
  return !is_one(p.groups) && refused(refusal, "takes one product, but the problem has groups");
}

/// The numbers of weights in codes, of one tensor or of groups, in memory that is lent for the call.
Matrix decoded(const Operand& codes, DType dtype, const Context& context) {
  const int64_t rows = codes.rows(), cols = codes.cols();
  auto* const memory = lend<std::byte>(context, times(times(rows, cols), size_of(dtype)));
  DequantizeProblem p{.spec = codes.spec,
                      .direction = codes.direction,
                      .rows = rows,
                      .cols = cols,
                      .data = codes.data,
                      .scale = codes.scale,
                      .amax = codes.amax,
                      .out = {memory, dtype, rows, cols, cols},
                      .groups = codes.groups,
                      .room = codes.room,
                      .what = codes.what};
  if (codes.each.empty()) dequantize(p, context);
  if (!codes.each.empty()) p.rows = p.out.rows = rows / std::ssize(codes.each), p.groups = {};
  for (const Side& side : codes.each) {
    p.data = side.data, p.scale = side.scale, p.amax = side.amax;
    dequantize(p, context);
    p.out.data = static_cast<std::byte*>(p.out.data) + p.rows * cols * size_of(dtype);
  }
  return {memory, dtype, rows, cols, cols};
}

/// Lists of one product are its matrices.
void matmul_library(const MatmulProblem& p, const Context& context) {
  const Matrix b = p.codes ? decoded(*p.codes, p.out.dtype, context) : p.bs.empty() ? p.b : p.bs[0];
  matmul_in_use()({.a = p.a,
                   .b = b,
                   .transpose_a = p.transpose_a,
                   .transpose_b = p.transpose_b,
                   .bias = p.biases.empty() ? p.bias : p.biases[0],
                   .out = p.outs.empty() ? p.out : p.outs[0]},
                  context);
}

/// The dtype of 16 bits in which tensor cores can multiply: out's; of float32 results, that of both operands, which
/// float32 holds exactly.
std::optional<DType> dtype_of_16_bits(const MatmulProblem& p) {
  if (p.out.dtype != DType::f32) return p.out.dtype;
  const std::optional<DType> of_b = common_dtype(p.b, p.bs);
  return !p.codes && p.a.dtype != DType::f32 && of_b == p.a.dtype ? of_b : std::nullopt;
}

/// Where a library multiplies one product of matrices, it does so for few rows too.
bool refuses_few_rows(const MatmulProblem& p, const Context&, Refusal* refusal) {
  if (most_rows(p) > kMostFewRows)
    return refused(refusal, "takes at most ", kMostFewRows, " rows of a, which can have ", most_rows(p));
  if (!p.codes && is_one(p.groups)) return refused(refusal, "takes weights in codes or groups, but b is one matrix");
  if (p.transpose_a || !p.transpose_b)
    return refused(refusal, "reads the terms of an output along rows of a and of b, but they lie across them");
  const std::optional<DType> dtype = dtype_of_16_bits(p), of_b = common_dtype(p.b, p.bs);
  return (!dtype || p.a.dtype != dtype || (!p.codes && of_b != dtype)) &&
         refused(refusal, "takes operands in the result's dtype, float16 or bfloat16, but they have others");
}

void matmul_few_rows(const MatmulProblem& p, const Context& context) {
  const size_t bits = !p.codes ? 2 : p.codes->spec.packed() ? 0 : 1;
  const Kernel& kernel = kFewRows[dtype_of_16_bits(p) == DType::bf16 ? 0 : 1][bits];
  const Grid grid = grid_of(ceil_div(p.out.cols, kPlainFewColumns) * kPlainFewThreads, kPlainFewThreads);
  launch(kernel, with_groups(grid, p.groups.count), job_of(p, context), context);
}

/// Whether copies of 16 bytes have all of a matrix.
bool in_vectors(const Matrix& m) {
  return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.row_stride % kUnitOfCopies == 0 &&
         m.cols % kUnitOfCopies == 0;
}

bool refuses_pipelined(const MatmulProblem& p, const Context&, Refusal* refusal) {
  const std::optional<DType> dtype = dtype_of_16_bits(p);
  if (!dtype || p.a.dtype != dtype || (!p.codes && common_dtype(p.b, p.bs) != dtype))
    return refused(refusal, "multiplies operands in one dtype, float16 or bfloat16, which a result in 16 bits has too");
  if (p.transpose_a && p.transpose_b) return refused(refusal, "takes no transposed a with a transposed b");
  const bool copied = in_vectors(p.a) && (p.codes        ? p.codes->cols() % kUnitOfCopies == 0
                                          : p.bs.empty() ? in_vectors(p.b)
                                                         : std::ranges::all_of(p.bs, in_vectors));
  return !copied && refused(refusal,
                            "copies 16 bytes at a time, but rows of a or b do not begin at multiples of 16 "
                            "bytes, or do not have a multiple of ",
                            kUnitOfCopies, " columns");
}

/// Blocks take tiles of all groups in turns, and as many blocks run as multiprocessors hold.
void matmul_pipelined(const MatmulProblem& problem, const Context& context) {
  MatmulProblem p = problem;
  if (p.codes) p.b = decoded(*p.codes, p.out.dtype, context), p.codes.reset();
  const bool wide = takes_wide_tiles(p, context);
  const int64_t rows = p.transpose_a ? p.out.rows : p.a.rows;
  const Grid grid = pipelined_grid({wide, rows, p.out.cols, p.groups.count}, context);
  const size_t across = p.transpose_a ? 2 : p.transpose_b ? 0 : 1;
  launch(kPipelined[dtype_of_16_bits(p) == DType::bf16 ? 0 : 1][wide][across], grid, job_of(p, context), context);
}

void launch_tiles(const Kernel& kernel, int64_t tile, int64_t threads, const MatmulProblem& p, const Context& context) {
  const MatmulJob job = job_of(p, context);
  const int64_t tiles = ceil_div(most_rows(p), tile) * ceil_div(p.out.cols, tile);
  launch(kernel, with_groups(grid_of(tiles * threads, static_cast<unsigned>(threads)), p.groups.count), job, context);
}

bool refuses_tiles(const MatmulProblem& p, const Context&, Refusal* refusal) {
  return !dtype_of_16_bits(p) &&
         refused(
             refusal,
             "multiplies in float16 or bfloat16, but the result is float32 and not both operands are in one of them");
}

void matmul_tiles(const MatmulProblem& p, const Context& context) {
  const bool large = takes_large_tiles(p, context), bf16 = dtype_of_16_bits(p) == DType::bf16;
  const int64_t tile = large ? kLargeTensorTile : kTensorTile;
  launch_tiles(large ? (bf16 ? kBf16Large : kF16Large) : bf16 ? kBf16 : kF16, tile, 2 * tile, p, context);
}

void matmul_tiles32(const MatmulProblem& p, const Context& context) {
  launch_tiles(kTiles32, kProductTile, kProductThreads, p, context);
}

}  // namespace

int64_t most_rows(const MatmulProblem& p) {
  if (p.transpose_a) return p.a.cols;
  return p.groups.ends.data ? p.a.rows : p.a.rows / p.groups.count;
}

bool takes_large_tiles(const MatmulProblem& p, const Context& context) {
  const int64_t rows = p.transpose_a ? p.a.cols : p.a.rows / p.groups.count;  // of equal groups
  return enough_for_large_tiles(p.groups.count, rows, p.out.cols, context);
}

bool takes_wide_tiles(const MatmulProblem& p, const Context& context) {
  const int64_t rows = p.transpose_a ? p.a.cols : p.a.rows / p.groups.count;
  return enough_for_wide_tiles(p.groups.count, rows, p.out.cols, context);
}

// skinny multiplies weights in codes as it does those of gemm: they are exact in bfloat16, and their scales multiply
// sums. few_rows reads a weight once, rounded to out's dtype, and the tensor cores sum its cuts: in which order depends
// on the contraction alone. library is PyTorch's product, with a weight in codes decoded first. It takes one product:
// where groups end is known to kernels alone. pipelined is the fast row of groups; it decodes weights first too, and
// sums whole contractions in the tensor cores. tiles takes operands of any dtype wherever they lie: tensor cores sum
// its cuts, as those of decode. tiles32 sums as decode32 does, and rounds operands to out's dtype before. In these
// three nothing depends on other rows. The reference sums in double.
//
// Not batch invariant: skinny, few_rows and library, as in gemm.cpp; and pipelined, which takes x only where its memory
// begins at a multiple of 16 bytes, so that the same row elsewhere in a batch is another kernel's.
constinit const Rows<MatmulProblem, 7> kMatmul{
    {{"skinny", varies<MatmulProblem, refuses_skinny>, multiply_skinny},
     {"few_rows", varies<MatmulProblem, refuses_few_rows>, matmul_few_rows},
     {"library", varies<MatmulProblem, refuses_library>, matmul_library},
     {"pipelined", varies<MatmulProblem, refuses_pipelined>, matmul_pipelined},
     {"tiles", refuses_tiles, matmul_tiles},
     {"tiles32", nullptr, matmul_tiles32},
     {"reference", nullptr, matmul_reference}}};

}  // namespace quire::cuda
