// Rows between the order of tokens and the order of experts. The bits of every row are those of the CPU.
#include "quire/base/shape.h"
#include "quire/cuda/kernels/moe.h"
#include "quire/cuda/launch.h"
#include "quire/cuda/rows.h"
#include "quire/cuda/vectors.h"

namespace quire::cuda {
namespace {

constinit const Kernel kFindSources{"permute", "find_sources"};
constinit const Kernel kPermuteRows{"permute", "permute_rows"};
constinit const Kernel kUnpermuteRows{"permute", "unpermute_rows"};
constinit const Kernel kPermutedDots{"permute", "permuted_dots"};
constinit const Kernel kPermuteVectors{"permute_vector", "permute_vectors"};
constinit const Kernel kUnpermuteVectors{"permute_vector", "unpermute_vectors"};
constinit const Kernel kPermutedDotVectors{"permute_vector", "permuted_dot_vectors"};

constexpr int64_t kWarp = 32;

Grid grid_of_warps(int64_t work) { return grid_of(times(work, kWarp)); }

/// The largest unit that rows of a matrix can be copied in.
int64_t unit_of(const Matrix& m) {
  const int64_t width = size_of(m.dtype);
  const uint64_t all = reinterpret_cast<uintptr_t>(m.data) | static_cast<uint64_t>(m.cols * width) |
                       static_cast<uint64_t>(m.row_stride * width);
  return all % 16 == 0 ? 16 : width;
}

/// kernel: of which lanes take units of that many bytes at a time.
void permute(const PermuteProblem& p, const Kernel& kernel, int64_t unit, const Context& context) {
  const int64_t places = p.map.tokens * p.map.slots, width = size_of(p.to.dtype);
  const PermuteJob job{.problem = p,
                       .unit = unit,
                       .row = Segments(p.to.cols * width / unit),
                       .source = lend<int64_t>(context, p.to.rows),
                       .site = fault_site(context, p.kOp)};
  fill(job.source, 0xFF, p.to.rows * static_cast<int64_t>(sizeof(int64_t)), context);
  if (places > 0) launch(kFindSources, grid_of(places), job, context);
  const int64_t work = std::max(p.to.rows * job.row.segments, ceil_div(places, kWarp));
  if (work > 0) launch(kernel, grid_of_warps(work), job, context);
}
void permute(const PermuteProblem& p, const Context& context) {
  permute(p, kPermuteRows, p.weights ? size_of(p.to.dtype) : std::min(unit_of(p.from), unit_of(p.to)), context);
}
void permute_by_vectors(const PermuteProblem& p, const Context& context) {
  permute(p, kPermuteVectors, kVector * size_of(p.to.dtype), context);
}

void unpermute(const UnpermuteProblem& p, const Kernel& kernel, int64_t each, const Context& context) {
  const Segments row(p.to.cols / each);
  if (p.to.rows == 0 || p.to.cols == 0) return;
  launch(kernel, grid_of_warps(p.to.rows * row.segments), UnpermuteJob{p, row, fault_site(context, p.kOp)}, context);
}
void unpermute(const UnpermuteProblem& p, const Context& context) { unpermute(p, kUnpermuteRows, 1, context); }
void unpermute_by_vectors(const UnpermuteProblem& p, const Context& context) {
  unpermute(p, kUnpermuteVectors, kVector, context);
}

/// Places that a warp takes at a time.
void permuted_dot(const PermutedDotProblem& p, const Kernel& kernel, int64_t of_warp, const Context& context) {
  const int64_t places = p.map.tokens * p.map.slots;
  if (places == 0) return;
  launch(kernel, grid_of_warps(ceil_div(places, of_warp)), PermutedDotJob{p, fault_site(context, p.kOp)}, context);
}
void permuted_dot(const PermutedDotProblem& p, const Context& context) { permuted_dot(p, kPermutedDots, 2, context); }
void permuted_dot_by_vectors(const PermutedDotProblem& p, const Context& context) {
  permuted_dot(p, kPermutedDotVectors, kWarp / 2, context);
}

/// Whether kernels of vectors cannot take a matrix of tokens, or one of experts' rows.
bool refuses_rows(std::string_view what, const Matrix& tokens, const Matrix& permuted, Refusal* refusal) {
  return refuses_vectors(what, tokens, permuted.dtype, refusal) ||
         refuses_vectors("the permuted matrix", permuted, permuted.dtype, refusal);
}
bool refuses_permute(const PermuteProblem& p, const Context&, Refusal* refusal) {
  if (!p.weights) return refused(refusal, "takes rows with weights; without them they are copied as bytes");
  return refuses_rows("the matrix of tokens", p.from, p.to, refusal);
}
bool refuses_unpermute(const UnpermuteProblem& p, const Context&, Refusal* refusal) {
  return refuses_rows("the matrix of tokens", p.to, p.from, refusal);
}
bool refuses_permuted_dot(const PermutedDotProblem& p, const Context&, Refusal* refusal) {
  return refuses_rows("the matrix of tokens", p.tokens, p.permuted, refusal);
}

}  // namespace

constinit const Rows<PermuteProblem, 2> kPermute{
    {{"vector", refuses_permute, permute_by_vectors}, {"reference", nullptr, permute}}};
constinit const Rows<UnpermuteProblem, 2> kUnpermute{
    {{"vector", refuses_unpermute, unpermute_by_vectors}, {"reference", nullptr, unpermute}}};
constinit const Rows<PermutedDotProblem, 2> kPermutedDot{
    {{"vector", refuses_permuted_dot, permuted_dot_by_vectors}, {"reference", nullptr, permuted_dot}}};

}  // namespace quire::cuda
