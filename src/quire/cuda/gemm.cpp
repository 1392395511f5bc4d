#include "quire/cuda/gemm.h"

#include "quire/cuda/cublaslt_product.h"
#include "quire/cuda/grouped.h"
#include "quire/cuda/kernels/bf16_lines.h"
#include "quire/cuda/rows.h"
#include "quire/cuda/skinny.h"

namespace quire::cuda {
namespace {

constinit const Kernel kGemmAny{"gemm", "gemm_any"};
constinit const Kernel kDecode32{"decode32", "decode32"};
constinit const Kernel kDecode{"decode", "decode_64"}, kDecodeLarge{"decode", "decode_128"};
constinit const Kernel kExact16{"exact", "exact_16"}, kExact32{"exact", "exact_32"};
constinit const Kernel kDecodeOperand{"bf16_lines", "decode_operand"};
constinit const Kernel kPipelined{"pipelined_codes", "codes_128"}, kPipelinedWide{"pipelined_codes", "codes_256"};
/// By the rows that they take at a time.
constinit const std::array<Kernel, 4> kFewRows{
    {{"few_rows", "few_rows_1"}, {"few_rows", "few_rows_2"}, {"few_rows", "few_rows_4"}, {"few_rows", "few_rows_8"}}};

/// Operands and outputs of products; rows that belong to no group are zero from here on.
GemmJob job_of(const GemmProblem& p, const Context& context) {
  GemmJob job{on_device(p.a, context), on_device(p.b, context), on_device(p, {p.bias, p.bias_dtype}, context),
              fault_site(context, text(p.kOp, ": the contraction of b"))};
  job.out.addend = p.addend;
  job.out.by_rows = p.a.direction == Direction::rowwise;
  if (job.out.by_rows && !p.addend && p.outs.empty()) zero_beyond(p.out, job.a.groups, context);
  return job;
}

void gemm_reference(const GemmProblem& p, const Context& context) {
  const GemmJob job = job_of(p, context);
  launch(kGemmAny, with_groups(grid_of(p.out.rows * p.out.cols), job.a.groups.count), job, context);
}

/// Rows of the largest product that groups can have.
int64_t most_rows(const Operand& a) {
  const bool equal = a.direction == Direction::rowwise && !a.groups.ends.data && !is_one(a.groups);
  return equal ? a.outer / a.groups.count : a.outer;
}

bool refuses_few_rows(const GemmProblem& p, const Context&, Refusal* refusal) {
  return most_rows(p.a) > kMostFewRows &&
         refused(refusal, "takes at most ", kMostFewRows, " rows of a, which can have ", most_rows(p.a),
                 "; decode reads their codes less often");
}

void gemm_few_rows(const GemmProblem& p, const Context& context) {
  const GemmJob job = job_of(p, context);
  const int64_t rows = most_rows(p.a);
  const Kernel& kernel = kFewRows[rows <= 1 ? 0 : rows <= 2 ? 1 : rows <= 4 ? 2 : 3];
  const Grid grid = grid_of(ceil_div(p.out.cols, kFewRowsColumns) * kFewRowsThreads, kFewRowsThreads);
  launch(kernel, with_groups(grid, job.a.groups.count), job, context);
}

void launch_tiles(const Kernel& kernel, int64_t tile, const GemmProblem& p, const Context& context) {
  const GemmJob job = job_of(p, context);
  const int64_t tiles = ceil_div(most_rows(p.a), tile) * ceil_div(p.out.cols, tile);
  launch(kernel, with_groups(grid_of(tiles * 2 * tile, static_cast<unsigned>(2 * tile)), job.a.groups.count), job,
         context);
}

/// Scales of bytes are multiplied into codes, and those that no block changes into finished sums.
bool refuses_pipelined_bf16(const GemmProblem& p, const Context&, Refusal* refusal) {
  for (const Operand* o : {&p.a, &p.b})
    if (o->spec.row().scale == ScaleKind::f32 && o->spec.row().scope == Scope::block)
      return refused(refusal,
                     "takes codes that are numbers of bfloat16 under the scales of their blocks, but scales of ",
                     o->spec, " are float32");
  return false;
}

/// The numbers of an operand, in memory that is lent for the call.
Bf16Lines decoded(const GroupedOperand& o, const Context& context) {
  const int64_t groups = o.groups.places ? o.groups.count : 0, row_bytes = bf16_numbers(o.all, groups) * 2;
  const Bf16Lines to{lend<unsigned char>(context, times(o.all.outer, row_bytes)), row_bytes};
  const bool by_rows = o.all.direction == Direction::rowwise;
  const int64_t of_lines = ceil_div(o.all.outer, kDecodeLines) + (by_rows ? groups : 0),
                of_numbers = ceil_div(o.all.contraction, kDecodeNumbers) + (by_rows ? 0 : groups);
  const int64_t most = kDecodeBlocks * driver().machine(context.index).multiprocessors;
  const Grid grid =
      grid_of(std::min(of_lines * of_numbers, most) * 2 * kDecodeLines, static_cast<unsigned>(2 * kDecodeLines));
  launch(kDecodeOperand, grid, DecodeJob{o, to}, context);
  return to;
}

void gemm_pipelined_bf16(const GemmProblem& p, const Context& context) {
  const GemmJob job = job_of(p, context);
  const bool wide = takes_wide_tiles(p, context);
  const int64_t rows = job.out.by_rows ? p.a.outer : p.out.rows;
  Grid grid = pipelined_grid({wide, rows, p.out.cols, job.a.groups.count}, context);
  grid.shared_bytes = bf16_gemm_bytes(wide ? 256 : 128);
  const Bf16Lines a = decoded(job.a, context), b = decoded(job.b, context);
  launch(wide ? kPipelinedWide : kPipelined, grid, Bf16GemmJob{job, a, b}, context);
}

void gemm_decode(const GemmProblem& p, const Context& context) {
  const bool large = takes_large_tiles(p, context);
  launch_tiles(large ? kDecodeLarge : kDecode, large ? kLargeTensorTile : kTensorTile, p, context);
}

bool refuses_exact(const GemmProblem& p, const Context&, Refusal* refusal) {
  for (const Operand* o : {&p.a, &p.b})
    if (!o->spec.packed())
      return refused(refusal, "takes 4-bit codes, whose block sums are exact in any order, but an operand is ",
                     o->spec);
  return false;
}

void gemm_exact(const GemmProblem& p, const Context& context) {
  const bool short_blocks = std::min(p.a.spec.row().block, p.b.spec.row().block) < 32;
  launch_tiles(short_blocks ? kExact16 : kExact32, kTensorTile, p, context);
}

void gemm_decode32(const GemmProblem& p, const Context& context) {
  const GemmJob job = job_of(p, context);
  const int64_t tiles = ceil_div(most_rows(p.a), kProductTile) * ceil_div(p.out.cols, kProductTile);
  launch(kDecode32, with_groups(grid_of(tiles * kProductThreads, kProductThreads), job.a.groups.count), job, context);
}

}  // namespace

// They decode each code half as often, and so are taken where there are enough of them for all multiprocessors.
bool enough_for_large_tiles(int64_t products, int64_t rows, int64_t cols, const Context& context) {
  const int64_t tiles = ceil_div(rows, kLargeTensorTile) * ceil_div(cols, kLargeTensorTile) * products;
  return rows > kTensorTile && tiles >= driver().machine(context.index).multiprocessors;
}

bool takes_large_tiles(const GemmProblem& p, const Context& context) {
  const int64_t products = std::max<int64_t>(p.a.groups.count, 1);
  const bool by_rows = p.a.direction == Direction::rowwise;
  return enough_for_large_tiles(products, by_rows ? p.a.outer / products : p.a.outer, p.out.cols, context);
}

// They read lines less often, but a multiprocessor has one of them at a time: it takes two in turns.
bool enough_for_wide_tiles(int64_t products, int64_t rows, int64_t cols, const Context& context) {
  const int64_t tiles = ceil_div(rows, int64_t{kPipelinedRows}) * ceil_div(cols, int64_t{256}) * products;
  return rows > kTensorTile && tiles >= 2 * driver().machine(context.index).multiprocessors;
}

bool takes_wide_tiles(const GemmProblem& p, const Context& context) {
  const int64_t products = std::max<int64_t>(p.a.groups.count, 1);
  const bool by_rows = p.a.direction == Direction::rowwise;
  return enough_for_wide_tiles(products, by_rows ? p.a.outer / products : p.a.outer, p.out.cols, context);
}

Grid pipelined_grid(const PipelinedTiles& tiles, const Context& context) {
  const int cols = tiles.wide ? 256 : 128, at_once = tiles.wide ? 1 : 2;
  const int64_t down = ceil_div(tiles.rows, int64_t{kPipelinedRows}) + tiles.groups;  // each may end within a tile
  const int64_t most = at_once * driver().machine(context.index).multiprocessors;
  return {.blocks = static_cast<unsigned>(
              std::clamp<int64_t>(down * ceil_div(tiles.cols, int64_t{cols}), 1, std::max<int64_t>(most, 1))),
          .threads = static_cast<unsigned>(cols),
          .shared_bytes = pipelined_bytes(cols)};
}

// skinny reads w once, at the speed of memory, and its tensor cores sum the cuts: in which order depends on the
// contraction alone. few_rows and decode32 sum as numerics.md 7.4 writes it: in float32, each cut in the order of the
// contraction, cuts in order, every operation rounded by itself. So their error is within the bound of 7.5, both give
// the same bits, and a row's bits depend on no other row. Tensor cores sum the cuts of decode, and whole contractions
// of pipelined_bf16, which decodes operands first, within the bounds that 7.5 gives for them; there too nothing depends
// on other rows. cublaslt sums as the chip does (7.6), and so does cublaslt_bf16. exact gives the bits of few_rows, for
// 4-bit operands. It stands behind decode because adding every block in float32 takes about as many instructions again
// as decoding the codes. The reference sums in double.
//
// Not batch invariant: skinny and few_rows, which take few rows only, so that the same row among more is another
// kernel's; and what calls NVIDIA's library, which may choose another algorithm for another number of rows.
constinit const Rows<GemmProblem, 9> kGemm{
    {{"skinny", varies<GemmProblem, refuses_skinny>, multiply_skinny},
     {"few_rows", varies<GemmProblem, refuses_few_rows>, gemm_few_rows},
     {"cublaslt", varies<GemmProblem, refuses_cublaslt>, gemm_cublaslt},
     {"cublaslt_bf16", varies<GemmProblem, refuses_cublaslt_bf16>, gemm_cublaslt_bf16},
     {"pipelined_bf16", refuses_pipelined_bf16, gemm_pipelined_bf16},
     {"decode", nullptr, gemm_decode},
     {"exact", refuses_exact, gemm_exact},
     {"decode32", nullptr, gemm_decode32},
     {"reference", nullptr, gemm_reference}}};

}  // namespace quire::cuda
