// Norms, activations, their gradients, and sums over rows: reference rows, whose bits are those of the CPU.
#include "quire/cuda/kernels/pointwise.h"

#include "quire/cuda/groups.h"
#include "quire/cuda/quantize.h"
#include "quire/cuda/rows.h"

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

/// Launches a kernel over some work, unless there is none.
template <class Job>
void launch_over(int64_t work, const Kernel& kernel, const Job& job, const Context& context) {
  if (work > 0) launch(kernel, grid_of(work), job, context);
}

bool is_quantized(const Destination& to) {
  const auto present = [](const Side& s) { return s.data || s.scale || s.amax; };
  return present(to.rowwise) || present(to.columnwise);
}

/// Where y is computed: memory of the workspace if only its quantization is wanted, and none if nothing is.
MutableMatrix computed_y(const Destination& to, const Context& context) {
  MutableMatrix y = to.y;
  if (y.data || !is_quantized(to)) return y;
  y.data = lend<char>(context, y.rows * y.cols * size_of(y.dtype)), y.row_stride = y.cols;
  return y;
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

ChunkLines lines_of(const Places& groups, int64_t cols) { return {.groups = groups, .cols = cols}; }

void norm_grad(const NormGradProblem& p, const Context& context) {
  GammaJob job{.problem = p, .lines = lines_of({.rows = p.x.rows}, p.x.cols), .gamma_chunks = {}, .beta_chunks = {}};
  const int64_t sums = job.lines.count() * p.x.cols;
  if (p.dgamma) job.gamma_chunks = lend<float>(context, sums);
  if (p.dbeta) job.beta_chunks = lend<float>(context, sums);
  if (p.dgamma || p.dbeta) {
    launch_over(sums, kGammaChunks, job, context);
    launch_over(p.x.cols, kGammaSums, job, context);
  }
  // dx may take the place of dy or x, which the sums have read.
  if (p.dx.data) launch_over(p.x.rows, kNormGradRows, p, context);
}

void column_sum(const ColumnSumProblem& p, const Context& context) {
  ColumnSumJob job{.x = p.x,
                   .out = p.out,
                   .dtype = p.out_dtype,
                   .lines = lines_of(place_groups(p.groups, p.x.rows, context), p.x.cols),
                   .chunks = nullptr};
  const int64_t sums = job.lines.count() * p.x.cols;
  job.chunks = lend<float>(context, sums);
  launch_over(sums, kColumnChunks, job, context);
  launch_over(job.lines.groups.count * p.x.cols, kColumnSums, job, context);
}

void activation(const ActivationProblem& p, const Context& context) {
  const ActivationJob job{p.activation, p.x, computed_y(p.out, context), place_groups(p.groups, p.x.rows, context)};
  zero_beyond(p.out.y, job.groups, context);
  if (job.y.data) launch_over(job.y.rows * job.y.cols, kActivationOf, job, context);
  QuantizeProblem quantization = p.out.quantization();
  quantization.x = job.y, quantization.groups = p.groups, quantization.room = p.room, quantization.what = "activation";
  quantize(quantization, context);
}

void activation_grad(const ActivationGradProblem& p, const Context& context) {
  launch_over(p.dy.rows * p.dy.cols, kActivationGradOf, p, context);
}

}  // namespace

constinit const Rows<ColumnSumProblem> kColumnSum{{{"reference", nullptr, column_sum}}};
constinit const Rows<NormProblem> kNorm{{{"reference", nullptr, norm}}};
constinit const Rows<NormGradProblem> kNormGrad{{{"reference", nullptr, norm_grad}}};
constinit const Rows<ActivationProblem> kActivation{{{"reference", nullptr, activation}}};
constinit const Rows<ActivationGradProblem> kActivationGrad{{{"reference", nullptr, activation_grad}}};

}  // namespace quire::cuda
