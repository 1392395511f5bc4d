#include "quire/cuda/gemm.h"

#include "quire/cuda/cublaslt_product.h"
#include "quire/cuda/grouped.h"
#include "quire/cuda/rows.h"

namespace quire::cuda {
namespace {

constinit const Kernel kGemmAny{"gemm", "gemm_any"};
constinit const Kernel kDecode32{"decode32", "decode32"};
constinit const Kernel kDecode{"decode", "decode_64"}, kDecodeLarge{"decode", "decode_128"};
constinit const Kernel kExact16{"exact", "exact_16"}, kExact32{"exact", "exact_32"};
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

// few_rows and decode32 sum as numerics.md 7.4 writes it: in float32, each cut in the order of the contraction, cuts in
// order, every operation rounded by itself. So their error is within the bound of 7.5, both give the same bits, and a
// row's bits depend on no other row. Tensor cores sum the cuts of decode, within the bound that 7.5 gives for them;
// there too nothing depends on other rows. cublaslt sums as the chip does (7.6). exact gives the bits of few_rows, for
// 4-bit operands. It stands behind decode because adding every block in float32 takes about as many instructions again
// as decoding the codes. The reference sums in double.
constinit const Rows<GemmProblem, 7> kGemm{{{"few_rows", refuses_few_rows, gemm_few_rows},
                                            {"cublaslt", refuses_cublaslt, gemm_cublaslt},
                                            {"cublaslt_bf16", refuses_cublaslt_bf16, gemm_cublaslt_bf16},
                                            {"decode", nullptr, gemm_decode},
                                            {"exact", refuses_exact, gemm_exact},
                                            {"decode32", nullptr, gemm_decode32},
                                            {"reference", nullptr, gemm_reference}}};

}  // namespace quire::cuda
