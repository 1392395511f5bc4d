// Norms, activations, their gradients, and sums over rows. The bits of every row are those of the CPU.

#include "quire/cuda/kernels/pointwise.h"
#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/norm_vector.h"
#include "quire/cuda/quantize.h"
#include "quire/cuda/rows.h"
#include "quire/cuda/sides.h"
#include "quire/cuda/vectors.h"

namespace quire::cuda {
namespace {

constinit const Kernel kNormMoments{"pointwise", "norm_moments"};
constinit const Kernel kNormValues{"pointwise", "norm_values"};
constinit const Kernel kNormGradRows{"pointwise", "norm_grad_rows"};
constinit const Kernel kGammaChunks{"pointwise", "gamma_chunks"};
constinit const Kernel kGammaSums{"pointwise", "gamma_sums"};
constinit const Kernel kColumnChunks{"pointwise", "column_chunks_of"};
constinit const Kernel kColumnSums{"pointwise", "column_sums"};
constinit const Kernel kActivationOf{"pointwise", "activation"};
constinit const Kernel kActivationGradOf{"pointwise", "activation_grad"};
constinit const Kernel kNormVector{"norm_vector", "norm_vector"};
constinit const Kernel kNormGradVector{"norm_vector", "norm_grad_vector"};
constinit const Kernel kGammaChunksVector{"column_vector", "gamma_chunks_vector"};
constinit const Kernel kColumnChunksVector{"column_vector", "column_chunks_vector"};
constinit const Kernel kActivationVector{"pointwise_vector", "activation_vector"};
constinit const Kernel kActivationGradVector{"pointwise_vector", "activation_grad_vector"};

/// Launches a kernel over some work, unless there is none.
template <class Job>
void launch_over(int64_t work, const Kernel& kernel, const Job& job, const Context& context) {
  if (work > 0) launch(kernel, grid_of(work), job, context);
}

bool is_quantized(const Destination& to) { return is_present(to.rowwise) || is_present(to.columnwise); }

/// Where y is computed: memory of the workspace if only its quantization is wanted, and none if nothing is.
MutableMatrix computed_y(const Destination& to, const Context& context) {
  MutableMatrix y = to.y;
  if (y.data || !is_quantized(to)) return y;
  y.data = lend<char>(context, y.rows * y.cols * size_of(y.dtype)), y.row_stride = y.cols;
  return y;
}

/// The shared memory of a block of some warps, for rows of some matrices like x.
struct RowBlock {
  RowMemory memory;
  int64_t bytes;

  RowBlock(const Matrix& x, int64_t matrices, int64_t warps)
      : memory{.stride = RowMemory::stride_of(x.cols, x.dtype), .warps = warps},
        bytes(RowMemory::bytes_of_gains(x.cols) + warps * kWarpRows * matrices * memory.stride * size_of(x.dtype)) {}
};

/// How many blocks a multiprocessor holds by their shared memory, of which each takes a kilobyte more.
int64_t resident(const RowBlock& block, const Machine& machine) {
  constexpr int64_t beside = 1 << 10;
  return (machine.shared_bytes + beside) / (block.bytes + beside);
}

/// Of as many warps as keep the most rows in flight on a multiprocessor.
RowBlock best_block(const Matrix& x, int64_t matrices, const Machine& machine) {
  constexpr int64_t most_warps = 16;
  RowBlock best(x, matrices, 1);
  for (int64_t warps = 2; warps <= most_warps; ++warps) {
    const RowBlock next(x, matrices, warps);
    if (resident(next, machine) * warps >= resident(best, machine) * best.memory.warps) best = next;
  }
  return best;
}

/// Launches a kernel of rows, of a job that has no memory yet. Not more blocks than a device holds: each warp takes
/// rows in turn, and the block prepares the gains once.
template <class Job>
void launch_rows(const Kernel& kernel, Job job, int64_t matrices, const Context& context) {
  const Matrix& x = job.problem.x;
  if (x.rows == 0) return;
  const Machine machine = driver().machine(context.index);
  const RowBlock block = best_block(x, matrices, machine);
  job.memory = block.memory;
  Grid grid = grid_of(ceil_div(x.rows, kWarpRows) * 32, static_cast<unsigned>(block.memory.warps * 32));
  grid.blocks = std::min(grid.blocks, static_cast<unsigned>(resident(block, machine) * machine.multiprocessors));
  grid.shared_bytes = static_cast<unsigned>(block.bytes);
  launch(kernel, grid, job, context);
}

/// Whether a block has no room for one warp's rows.
bool refuses_length(const Matrix& x, int64_t matrices, const Context& context, Refusal* refusal) {
  const int64_t most = driver().machine(context.index).shared_bytes;
  return RowBlock(x, matrices, 1).bytes > most &&
         refused(refusal, "takes rows of which ", kWarpRows * matrices, " and their gains fit into ", most,
                 " bytes, but x has ", x.cols, " columns of ", name(x.dtype));
}

bool refuses_column_sum(const ColumnSumProblem& p, const Context&, Refusal* refusal) {
  return refuses_vectors("x", p.x, p.x.dtype, refusal);
}

bool refuses_norm(const NormProblem& p, const Context& context, Refusal* refusal) {
  MutableMatrix y = p.out.y;
  if (!y.data) y.row_stride = y.cols;
  if (refuses_vectors("x", p.x, p.x.dtype, refusal) || refuses_vectors("y", y, p.x.dtype, refusal)) return true;
  if (!is_aligned(p.gamma.data) || !is_aligned(p.beta.data))
    return refused(refusal, "takes gamma and beta that begin at multiples of 16 bytes");
  return refuses_length(p.x, 1, context, refusal);
}

bool refuses_norm_grad(const NormGradProblem& p, const Context& context, Refusal* refusal) {
  if (refuses_vectors("x", p.x, p.x.dtype, refusal) || refuses_vectors("dy", p.dy, p.x.dtype, refusal) ||
      (p.dx.data && refuses_vectors("dx", p.dx, p.x.dtype, refusal)))
    return true;
  if (!is_aligned(p.gamma.data)) return refused(refusal, "takes a gamma that begins at a multiple of 16 bytes");
  return p.dx.data && refuses_length(p.x, 2, context, refusal);  // sums over rows need no row
}

/// x, and what it is made of or made to: a gated one has two halves, each of whole vectors.
bool refuses_activation(const Matrix& x, const Matrix& half, std::string_view what, Refusal* refusal) {
  return refuses_vectors(what, half, x.dtype, refusal) || refuses_vectors("x", x, x.dtype, refusal);
}
bool refuses_activation(const ActivationProblem& p, const Context&, Refusal* refusal) {
  MutableMatrix y = p.out.y;
  if (!y.data) y.row_stride = y.cols;
  return refuses_activation(p.x, y, "y", refusal);
}
bool refuses_activation_grad(const ActivationGradProblem& p, const Context&, Refusal* refusal) {
  return refuses_activation(p.x, p.dy, "dy", refusal) || refuses_vectors("dx", p.dx, p.x.dtype, refusal);
}

void norm(const NormProblem& problem, const Context& context) {
  NormProblem p = problem;
  p.out.y = computed_y(p.out, context);
  if (!p.mean && p.kind == NormKind::layer) p.mean = lend<float>(context, p.x.rows);
  if (!p.rstd) p.rstd = lend<float>(context, p.x.rows);
  launch_over(p.x.rows, kNormMoments, p, context);
  if (p.out.y.data) launch_over(p.x.rows * p.x.cols, kNormValues, p, context);
  quantize(p.out.quantization(), context);
}

void norm_by_vectors(const NormProblem& problem, const Context& context) {
  NormProblem p = problem;
  p.out.y = computed_y(p.out, context);
  launch_rows(kNormVector, NormVectorJob{p, {}}, 1, context);
  quantize(p.out.quantization(), context);
}

/// A block for the columns of each chunk that its threads have.
void launch_columns(const Kernel& kernel, const auto& job, const Context& context) {
  const int64_t blocks = job.lines.count() * ceil_div(job.lines.cols, 2 * int64_t{kBlockThreads});
  launch_over(blocks * kBlockThreads, kernel, job, context);
}

/// dgamma and dbeta. vectors: the matrices are aligned, and of one dtype.
void sum_gamma(const NormGradProblem& p, bool vectors, const Context& context) {
  if (!p.dgamma && !p.dbeta) return;
  GammaJob job{.problem = p, .lines = {{.rows = p.x.rows}, p.x.cols}, .gamma_chunks = {}, .beta_chunks = {}};
  const int64_t sums = job.lines.count() * p.x.cols;
  if (p.dgamma) job.gamma_chunks = lend<float>(context, sums);
  if (p.dbeta) job.beta_chunks = lend<float>(context, sums);
  vectors ? launch_columns(kGammaChunksVector, job, context) : launch_over(sums, kGammaChunks, job, context);
  launch_over(p.x.cols, kGammaSums, job, context);
}

// dx may take the place of dy or x: the sums read them before.
void norm_grad(const NormGradProblem& p, const Context& context) {
  sum_gamma(p, false, context);
  if (p.dx.data) launch_over(p.x.rows, kNormGradRows, p, context);
}
void norm_grad_by_vectors(const NormGradProblem& p, const Context& context) {
  sum_gamma(p, true, context);
  if (p.dx.data) launch_rows(kNormGradVector, NormGradVectorJob{p, {}}, 2, context);
}

void column_sum(const ColumnSumProblem& p, bool vectors, const Context& context) {
  ColumnSumJob job{.x = p.x,
                   .out = p.out,
                   .dtype = p.out_dtype,
                   .lines = {place_groups(p.groups, p.x.rows, context), p.x.cols},
                   .chunks = nullptr};
  const int64_t sums = job.lines.count() * p.x.cols;
  job.chunks = lend<float>(context, sums);
  vectors ? launch_columns(kColumnChunksVector, job, context) : launch_over(sums, kColumnChunks, job, context);
  launch_over(job.lines.groups.count * p.x.cols, kColumnSums, job, context);
}
void column_sum(const ColumnSumProblem& p, const Context& context) { column_sum(p, false, context); }
void column_sum_by_vectors(const ColumnSumProblem& p, const Context& context) { column_sum(p, true, context); }

/// kernel: of which each thread takes `each` elements.
void activation(const ActivationProblem& p, const Kernel& kernel, int64_t each, const Context& context) {
  const ActivationJob job{p.activation, p.x, computed_y(p.out, context), place_groups(p.groups, p.x.rows, context)};
  zero_beyond(p.out.y, job.groups, context);
  if (job.y.data) launch_over(job.y.rows * job.y.cols / each, kernel, job, context);
  QuantizeProblem quantization = p.out.quantization();
  quantization.x = job.y, quantization.groups = p.groups, quantization.room = p.room, quantization.what = "activation";
  quantize(quantization, context);
}
void activation(const ActivationProblem& p, const Context& context) { activation(p, kActivationOf, 1, context); }
void activation_by_vectors(const ActivationProblem& p, const Context& context) {
  activation(p, kActivationVector, kVector, context);
}

/// kernel: of which each thread takes `each` elements. It does not know groups: what it gives for rows beyond them is
/// replaced.
void activation_grad(const ActivationGradProblem& p, const Kernel& kernel, int64_t each, const Context& context) {
  launch_over(p.dy.rows * p.dy.cols / each, kernel, p, context);
  zero_beyond(p.dx, place_groups(p.groups, p.x.rows, context), context);
}
void activation_grad(const ActivationGradProblem& p, const Context& context) {
  activation_grad(p, kActivationGradOf, 1, context);
}
void activation_grad_by_vectors(const ActivationGradProblem& p, const Context& context) {
  activation_grad(p, kActivationGradVector, kVector, context);
}

}  // namespace

constinit const Rows<ColumnSumProblem, 2> kColumnSum{
    {{"vector", refuses_column_sum, column_sum_by_vectors}, {"reference", nullptr, column_sum}}};
constinit const Rows<NormProblem, 2> kNorm{{{"vector", refuses_norm, norm_by_vectors}, {"reference", nullptr, norm}}};
constinit const Rows<NormGradProblem, 2> kNormGrad{
    {{"vector", refuses_norm_grad, norm_grad_by_vectors}, {"reference", nullptr, norm_grad}}};
constinit const Rows<ActivationProblem, 2> kActivation{
    {{"vector", refuses_activation, activation_by_vectors}, {"reference", nullptr, activation}}};
constinit const Rows<ActivationGradProblem, 2> kActivationGrad{
    {{"vector", refuses_activation_grad, activation_grad_by_vectors}, {"reference", nullptr, activation_grad}}};

}  // namespace quire::cuda
