#include "quire/cuda/sides.h"

#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/quantize.h"

namespace quire::cuda {
namespace {

constinit const Kernel kCheckGiven{"quantize", "check_given"};

void clear(const QuantizeProblem& p, Direction direction, const Places& groups, const Context& context) {
  const Side& side = side_of(p, direction);
  const bool flat = !is_one(p.groups), bytes = has_byte_scales(p.spec);
  BufferCounts<int64_t> count = p.room.of(direction);
  if (!flat) count = counts(buffers<int64_t>(p.spec, {p.x.rows, p.x.cols}, direction));
  if (p.spec.interleaved)
    fill(side.data, 0, count[0], context);
  else
    zero_rest(side.data, count[0], groups, context);
  if (flat || bytes) fill(side.scale, 0, count[1] * (bytes ? 1 : 4), context);
  if (flat) fill(side.amax, 0, count[2] * 4, context);
}

/// Reports numbers of the caller that break their rule: of groups that have rows.
void check_given(const QuantizeProblem& p, Direction direction, const Places& groups, const Context& context) {
  const GivenJob job{.spec = p.spec,
                     .direction = direction,
                     .groups = groups,
                     .cols = p.x.cols,
                     .scale = p.spec.given ? p.scale : nullptr,
                     .amaxes = p.amax.of(direction),
                     .count = amaxes_of(p.spec, p.x, p.groups, direction),
                     .of_scale = fault_site(context, text("quantize: the static scale of ", p.spec)),
                     .of_amax = fault_site(context, p.kOp)};
  if (job.scale || job.amaxes) launch(kCheckGiven, grid_of(std::max(groups.count, job.count)), job, context);
}

}  // namespace

Matrix all_of(const QuantizeProblem& p) {
  Matrix x = p.x;
  if (!p.each.empty()) x.dtype = p.each[0].dtype;
  return x;
}

int64_t amaxes_of(const QuantSpec& spec, const Matrix& x, const RowGroups& groups, Direction direction) {
  return grouped_amax_count(spec, GroupSizes<int64_t>{x.rows, x.cols, groups.count}, direction);
}

Places place_side(const QuantizeProblem& p, Direction direction, const Context& context) {
  const Places groups =
      place_groups(p.groups, p.x.rows, FlatGroups{p.spec, direction, p.x.cols, p.room.of(direction), p.what}, context);
  check_given(p, direction, groups, context);
  clear(p, direction, groups, context);
  return groups;
}

}  // namespace quire::cuda
