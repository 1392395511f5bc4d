#include "quire/cuda/kernels/gemm.h"
#include "quire/cuda/cublaslt_product.h"
#include "quire/cuda/groups.h"
#include "quire/cuda/rows.h"
#include "quire/device/library.h"

namespace quire::cuda {
namespace {

constinit const Kernel kGemmAny{"gemm", "gemm_any"};
constinit const Kernel kMatmulAny{"gemm", "matmul_any"};
constinit const Kernel kDecode32{"decode32", "decode32"};
/// By the rows that they take at a time.
constinit const std::array<Kernel, 4> kFewRows{
    {{"few_rows", "few_rows_1"}, {"few_rows", "few_rows_2"}, {"few_rows", "few_rows_4"}, {"few_rows", "few_rows_8"}}};

/// An operand whose groups have been placed and whose lists lie on the device.
GroupedOperand on_device(const Operand& o, const Context& context) {
  GroupedOperand g{.all = o, .each = list_on_device(o.each, context), .groups = {}};
  g.all.each = {};
  g.groups = o.each.empty()
                 ? place_groups(o.groups, o.rows(), FlatGroups{o.spec, o.direction, o.cols(), o.room, o.what}, context)
                 : place_groups(o.groups, o.rows(), context);
  return g;
}

template <class Problem>
GroupedOutput on_device(const Problem& p, const Vector& bias, const Context& context) {
  return {.all = p.out,
          .each = list_on_device(p.outs, context),
          .bias = bias,
          .biases = list_on_device(p.biases, context),
          .in_groups = p.in_groups()};
}

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
                 "; decode32 reads their codes less often");
}

void gemm_few_rows(const GemmProblem& p, const Context& context) {
  const GemmJob job = job_of(p, context);
  const int64_t rows = most_rows(p.a);
  const Kernel& kernel = kFewRows[rows <= 1 ? 0 : rows <= 2 ? 1 : rows <= 4 ? 2 : 3];
  const Grid grid = grid_of(ceil_div(p.out.cols, kFewRowsColumns) * kFewRowsThreads, kFewRowsThreads);
  launch(kernel, with_groups(grid, job.a.groups.count), job, context);
}

void gemm_decode32(const GemmProblem& p, const Context& context) {
  const GemmJob job = job_of(p, context);
  const int64_t tiles = ceil_div(most_rows(p.a), kProductTile) * ceil_div(p.out.cols, kProductTile);
  launch(kDecode32, with_groups(grid_of(tiles * kProductThreads, kProductThreads), job.a.groups.count), job, context);
}

void matmul_reference(const MatmulProblem& p, const Context& context) {
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
  launch(kMatmulAny, with_groups(grid_of(p.out.rows * p.out.cols), p.groups.count), job, context);
}

bool refuses_library(const MatmulProblem& p, const Context&, Refusal* refusal) {
  if (!matmul_in_use()) return refused_here(refusal, "no library is lent to multiply plain matrices (set_matmul)");
  return p.in_groups() && refused(refusal, "takes one tensor, but the problem has groups");
}

void matmul_library(const MatmulProblem& p, const Context& context) { matmul_in_use()(p, context); }

}  // namespace

// few_rows and decode32 sum as numerics.md 7.4 writes it: in float32, each cut in the order of the contraction, cuts in
// order, every operation rounded by itself. So their error is within the bound of 7.5, both give the same bits, and a
// row's bits depend on no other row. cublaslt sums as the chip does (7.6), the reference in double.
constinit const Rows<GemmProblem, 4> kGemm{{{"few_rows", refuses_few_rows, gemm_few_rows},
                                            {"cublaslt", refuses_cublaslt, gemm_cublaslt},
                                            {"decode32", nullptr, gemm_decode32},
                                            {"reference", nullptr, gemm_reference}}};
constinit const Rows<MatmulProblem, 2> kMatmul{
    {{"library", refuses_library, matmul_library}, {"reference", nullptr, matmul_reference}}};

}  // namespace quire::cuda
