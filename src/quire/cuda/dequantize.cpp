#include <algorithm>
#include <cstdint>

#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/dequantize_vector.h"
#include "quire/cuda/kernels/quantize.h"
#include "quire/cuda/quantize.h"
#include "quire/cuda/rows.h"

namespace quire::cuda {
namespace {

constinit const Kernel kDequantizeAny{"quantize", "dequantize_any"};
constinit const Kernel kAlong{"dequantize_vector", "dequantize_along"};
constinit const Kernel kAcrossMemory{"dequantize_vector", "dequantize_across"};

DequantizeJob job_of(const DequantizeProblem& p, const Context& context) {
  const Places groups =
      place_groups(p.groups, p.rows, FlatGroups{p.spec, p.direction, p.cols, p.room, p.what}, context);
  zero_beyond(p.out, groups, context);
  return {p, groups};
}

void dequantize_reference(const DequantizeProblem& p, const Context& context) {
  const DequantizeJob job = job_of(p, context);
  launch(kDequantizeAny, with_groups(grid_of(p.out.rows * p.out.cols), job.groups.count), job, context);
}

bool begins_at(const void* data, uintptr_t multiple) { return reinterpret_cast<uintptr_t>(data) % multiple == 0; }

/// Warps that have work in one matrix.
int64_t warps_of(const DequantizeProblem& p) {
  if (!blocks_first(p.spec, p.direction)) return times(p.out.rows, ceil_div(p.out.cols, kSegmentCodes));
  return times(ceil_div(p.out.rows, kAcross), ceil_div(p.out.cols, kAcross * kAcrossInTurn) * kAcrossInTurn);
}

bool refuses_codes(const DequantizeProblem& p, Refusal* refusal) {
  if (p.spec.interleaved) return refused(refusal, "reads codes in the plain order, but ", p.spec, " is interleaved");
  if (p.out.cols % 8 != 0) return refused(refusal, "takes lines of multiples of 8 codes, but they have ", p.out.cols);
  const bool against = blocks_first(p.spec, p.direction);
  if (against && p.out.rows % 4 != 0)
    return refused(refusal, "takes multiples of 4 lines that run against memory, but there are ", p.out.rows);
  const uintptr_t bytes = against || p.spec.packed() ? 4 : 8;
  return !begins_at(p.data, bytes) && refused(refusal, "takes codes that begin at multiples of ", bytes, " bytes");
}

bool refuses_vectors(const DequantizeProblem& p, const Context&, Refusal* refusal) {
  if (refuses_codes(p, refusal)) return true;
  if (!begins_at(p.out.data, 16) || (p.out.rows > 1 && p.out.row_stride * size_of(p.out.dtype) % 16 != 0))
    return refused(refusal, "takes rows that begin at multiples of 16 bytes, but those of out do not");
  constexpr int64_t most = int64_t{1} << 34;
  return (times(p.out.rows, p.out.cols) >= most || warps_of(p) > INT32_MAX || p.out.cols > INT32_MAX / 2) &&
         refused(refusal, "takes fewer than 2^34 elements, 2^31 lines and 2^30 columns, but out is [", p.out.rows, ", ",
                 p.out.cols, "]");
}

/// Not more blocks than keep a device busy: what a warp finds out at first serves several pieces of lines then.
Grid grid_of_pieces(int64_t warps, int64_t groups, const Context& context) {
  constexpr int64_t warp = 32, busy = 64;
  Grid grid = grid_of(ceil_div(warps, groups) * warp);
  const int64_t most = ceil_div(busy * driver().machine(context.index).multiprocessors, groups);
  grid.blocks = std::min(grid.blocks, static_cast<unsigned>(most));
  return with_groups(grid, groups);
}

void dequantize_by_vectors(const DequantizeProblem& p, const Context& context) {
  const DequantizeJob job = job_of(p, context);
  const int64_t warps = warps_of(p), groups = job.groups.count;
  if (warps == 0 || groups == 0) return;
  launch(blocks_first(p.spec, p.direction) ? kAcrossMemory : kAlong, grid_of_pieces(warps, groups, context), job,
         context);
}

}  // namespace

void dequantize(const DequantizeProblem& p, const Context& context) {
  choose(p.kOp, Choice<DequantizeProblem>{kernels<DequantizeProblem>(context)}, p, context).run(p, context);
}

constinit const Rows<DequantizeProblem, 2> kDequantize{
    {{"vector", refuses_vectors, dequantize_by_vectors}, {"reference", nullptr, dequantize_reference}}};

}  // namespace quire::cuda
