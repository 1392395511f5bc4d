#include "quire/cuda/quantize.h"

#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/quantize.h"
#include "quire/cuda/rows.h"
#include "quire/cuda/sides.h"
#include "quire/cuda/tiles.h"

namespace quire::cuda {
namespace {

constinit const Kernel kMeasureAmax{"quantize", "measure_amax"};
constinit const Kernel kQuantizeAny{"quantize", "quantize_any"};
constinit const Kernel kReorderAny{"quantize", "reorder"};

/// Threads for the parts of a direction of a matrix, or of the largest of groups: all rows at most.
Grid grid_of_parts(const QuantSpec& spec, const Matrix& x, Direction direction, const Places& groups) {
  return with_groups(grid_of(Parts(ValueLines(spec, x, direction)).count), groups.count);
}

/// Amaxes above the blocks of a direction, with zeros of groups without rows.
void measure(AmaxJob job, int64_t count, const Context& context) {
  fill(job.to, 0, count * static_cast<int64_t>(sizeof(uint32_t)), context);
  if (job.x.rows == 0 || job.x.cols == 0) return;
  launch(kMeasureAmax, grid_of_parts(job.spec, job.x, job.direction, job.groups), job, context);
}

/// Given or measured; null where the spec has none.
const float* amaxes_above(const QuantizeProblem& p, AmaxJob job, const Context& context) {
  const int64_t count = amaxes_of(p.spec, job.x, p.groups, job.direction);
  const float* const given = p.amax.of(job.direction);
  if (count == 0 || given) return given;
  job.to = lend<uint32_t>(context, count);
  measure(job, count, context);
  return reinterpret_cast<const float*>(job.to);
}

void quantize_side(const QuantizeProblem& p, Direction direction, const Matrix* each, const Context& context) {
  if (!is_present(side_of(p, direction))) return;
  const Matrix x = all_of(p);
  const Places groups = place_side(p, direction, context);
  const QuantizeJob job{.spec = p.spec,
                        .x = x,
                        .direction = direction,
                        .side = side_of(p, direction),
                        .random = p.random,
                        .scale = p.scale,
                        .amaxes = amaxes_above(p, {p.spec, x, direction, groups, each, nullptr}, context),
                        .groups = groups,
                        .each = each,
                        .only = p.only};
  launch(kQuantizeAny, grid_of_parts(p.spec, x, direction, groups), job, context);
}

/// Any spec, any problem.
void quantize_reference(const QuantizeProblem& p, const Context& context) {
  const Matrix* const each = list_on_device(p.each, context);
  for (const Direction d : kDirections) quantize_side(p, d, each, context);
}

void amax(const AmaxProblem& p, const Context& context) {
  const Places groups = place_groups(p.groups, p.x.rows, context);
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    float* const to = d == Direction::rowwise ? p.rowwise : p.columnwise;
    if (!to) continue;
    measure({p.spec, p.x, d, groups, nullptr, reinterpret_cast<uint32_t*>(to)}, amaxes_of(p.spec, p.x, p.groups, d),
            context);
  }
}

void reorder(const ReorderProblem& p, const Context& context) {
  const QuantSpec to = p.from.spec.reordered();
  const Operand& from = p.from;
  const bool columnwise = from.direction == Direction::columnwise;
  const Shape<int64_t> shape =
      columnwise ? Shape<int64_t>{from.contraction, from.outer} : Shape<int64_t>{from.outer, from.contraction};
  const BufferCounts<int64_t> count = counts(buffers<int64_t>(to, shape, from.direction));
  const bool bytes = has_byte_scales(to);
  fill(p.data, 0, count[0], context);
  if (bytes) fill(p.scale, 0, count[1], context);
  const int64_t f32_scales = bytes || !from.scale || !p.scale ? 0 : count[1];  // there is one even of no elements
  launch(kReorderAny, grid_of(std::max(from.contraction == 0 ? 0 : from.outer, f32_scales)),
         ReorderJob{from, to, static_cast<uint8_t*>(p.data), static_cast<uint8_t*>(p.scale), f32_scales}, context);
}

}  // namespace

void quantize(const QuantizeProblem& p, const Context& context) {
  if (!is_present(p.rowwise) && !is_present(p.columnwise)) return;
  choose(p.kOp, Choice<QuantizeProblem>{kernels<QuantizeProblem>(context)}, p, context).run(p, context);
}

constinit const Rows<QuantizeProblem, 2> kQuantize{
    {{"tiles", refuses_tiles, quantize_tiles}, {"reference", nullptr, quantize_reference}}};
constinit const Rows<AmaxProblem, 2> kAmax{{{"tiles", refuses_amax_tiles, amax_tiles}, {"reference", nullptr, amax}}};
constinit const Rows<ReorderProblem> kReorder{{{"reference", nullptr, reorder}}};

}  // namespace quire::cuda
