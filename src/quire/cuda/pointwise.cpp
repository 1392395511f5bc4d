// Norms, activations, their gradients, and sums over rows. The bits of every row are those of the CPU.

#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/pointwise_vector.h"
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
constinit const Kernel kNormVector{"pointwise_vector", "norm_vector"};
constinit const Kernel kNormGradVector{"pointwise_vector", "norm_grad_vector"};
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

/// The shared memory for rows of some matrices like x.
RowMemory row_memory(const Matrix& x, int64_t matrices) {
  constexpr int64_t without_asking = 48 << 10, most_warps = 4;
  RowMemory memory{.stride = RowMemory::stride_of(x.cols, x.dtype)};
  const int64_t bytes = kWarpRows * matrices * memory.stride * size_of(x.dtype);
  memory.warps = std::clamp<int64_t>(without_asking / bytes, 1, most_warps);
  return memory;
}

/// Not more blocks than keep a device busy: each warp then takes rows in turn.
Grid grid_of_rows(const RowMemory& memory, const Matrix& x, int64_t matrices, const Context& context) {
  constexpr unsigned busy = 16;
  Grid grid = grid_of(ceil_div(x.rows, kWarpRows) * 32, static_cast<unsigned>(memory.warps * 32));
  grid.blocks = std::min(grid.blocks, busy * static_cast<unsigned>(driver().machine(context.index).multiprocessors));
  grid.shared_bytes = static_cast<unsigned>(memory.warps * kWarpRows * matrices * memory.stride * size_of(x.dtype));
  return grid;
}

/// Whether the shared memory that every device has for a block has no room for one warp's rows.
bool refuses_length(const Matrix& x, int64_t matrices, Refusal* refusal) {
  constexpr int64_t most = 96 << 10;
  return kWarpRows * matrices * RowMemory::stride_of(x.cols, x.dtype) * size_of(x.dtype) > most &&
         refused(refusal, "takes rows of which ", kWarpRows * matrices, " fit into ", most, " bytes, but x has ",
                 x.cols, " columns of ", name(x.dtype));
}

bool refuses_norm(const NormProblem& p, const Context&, Refusal* refusal) {
  MutableMatrix y = p.out.y;
  if (!y.data) y.row_stride = y.cols;
  if (refuses_vectors("x", p.x, p.x.dtype, refusal) || refuses_vectors("y", y, p.x.dtype, refusal)) return true;
  if (!is_aligned(p.gamma.data) || !is_aligned(p.beta.data))
    return refused(refusal, "takes gamma and beta that begin at multiples of 16 bytes");
  return refuses_length(p.x, 1, refusal);
}

bool refuses_norm_grad(const NormGradProblem& p, const Context&, Refusal* refusal) {
  if (!p.dx.data) return refused(refusal, "takes problems with dx; the sums over rows have one kernel");
  for (const auto& [what, m] : {std::pair<std::string_view, Matrix>{"x", p.x}, {"dy", p.dy}, {"dx", p.dx}})
    if (refuses_vectors(what, m, p.x.dtype, refusal)) return true;
  if (!is_aligned(p.gamma.data)) return refused(refusal, "takes a gamma that begins at a multiple of 16 bytes");
  return refuses_length(p.x, 2, refusal);
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
  NormVectorJob job{problem, row_memory(problem.x, 1)};
  NormProblem& p = job.problem;
  p.out.y = computed_y(p.out, context);
  if (p.x.rows > 0) launch(kNormVector, grid_of_rows(job.memory, p.x, 1, context), job, context);
  quantize(p.out.quantization(), context);
}

/// dgamma and dbeta.
void sum_gamma(const NormGradProblem& p, const Context& context) {
  if (!p.dgamma && !p.dbeta) return;
  GammaJob job{.problem = p, .lines = {{.rows = p.x.rows}, p.x.cols}, .gamma_chunks = {}, .beta_chunks = {}};
  const int64_t sums = job.lines.count() * p.x.cols;
  if (p.dgamma) job.gamma_chunks = lend<float>(context, sums);
  if (p.dbeta) job.beta_chunks = lend<float>(context, sums);
  launch_over(sums, kGammaChunks, job, context);
  launch_over(p.x.cols, kGammaSums, job, context);
}

// dx may take the place of dy or x: the sums read them before.
void norm_grad(const NormGradProblem& p, const Context& context) {
  sum_gamma(p, context);
  if (p.dx.data) launch_over(p.x.rows, kNormGradRows, p, context);
}
void norm_grad_by_vectors(const NormGradProblem& p, const Context& context) {
  sum_gamma(p, context);
  const NormGradVectorJob job{p, row_memory(p.x, 2)};
  if (p.x.rows > 0) launch(kNormGradVector, grid_of_rows(job.memory, p.x, 2, context), job, context);
}

void column_sum(const ColumnSumProblem& p, const Context& context) {
  ColumnSumJob job{.x = p.x,
                   .out = p.out,
                   .dtype = p.out_dtype,
                   .lines = {place_groups(p.groups, p.x.rows, context), p.x.cols},
                   .chunks = nullptr};
  const int64_t sums = job.lines.count() * p.x.cols;
  job.chunks = lend<float>(context, sums);
  launch_over(sums, kColumnChunks, job, context);
  launch_over(job.lines.groups.count * p.x.cols, kColumnSums, job, context);
}

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

void activation_grad(const ActivationGradProblem& p, const Context& context) {
  launch_over(p.dy.rows * p.dy.cols, kActivationGradOf, p, context);
}
void activation_grad_by_vectors(const ActivationGradProblem& p, const Context& context) {
  launch_over(p.dy.rows * p.dy.cols / kVector, kActivationGradVector, p, context);
}

}  // namespace

constinit const Rows<ColumnSumProblem> kColumnSum{{{"reference", nullptr, column_sum}}};
constinit const Rows<NormProblem, 2> kNorm{{{"vector", refuses_norm, norm_by_vectors}, {"reference", nullptr, norm}}};
constinit const Rows<NormGradProblem, 2> kNormGrad{
    {{"vector", refuses_norm_grad, norm_grad_by_vectors}, {"reference", nullptr, norm_grad}}};
constinit const Rows<ActivationProblem, 2> kActivation{
    {{"vector", refuses_activation, activation_by_vectors}, {"reference", nullptr, activation}}};
constinit const Rows<ActivationGradProblem, 2> kActivationGrad{
    {{"vector", refuses_activation_grad, activation_grad_by_vectors}, {"reference", nullptr, activation_grad}}};

}  // namespace quire::cuda
