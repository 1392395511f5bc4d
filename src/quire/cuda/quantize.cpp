#include "quire/cuda/quantize.h"

#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/quantize.h"
#include "quire/cuda/rows.h"

namespace quire::cuda {
namespace {

constinit const Kernel kMeasureAmax{"quantize", "measure_amax"};
constinit const Kernel kQuantizeAny{"quantize", "quantize_any"};
constinit const Kernel kCheckGiven{"quantize", "check_given"};
constinit const Kernel kDequantizeAny{"quantize", "dequantize_any"};
constinit const Kernel kReorderAny{"quantize", "reorder"};

/// Blocks along y take groups: more than one only where there are groups.
Grid grid_of_groups(int64_t work, const Places& groups) {
  constexpr int64_t most = 1 << 15;
  Grid grid = grid_of(work);
  grid.blocks_y = static_cast<unsigned>(std::clamp<int64_t>(groups.count, 1, most));
  return grid;
}

/// Threads for the parts of a direction of a matrix, or of the largest of groups: all rows at most.
Grid grid_of_parts(const QuantSpec& spec, const Matrix& x, Direction direction, const Places& groups) {
  return grid_of_groups(Parts(ValueLines(spec, x, direction)).count, groups);
}

int64_t amaxes_of(const QuantSpec& spec, const Matrix& x, const RowGroups& groups, Direction direction) {
  return grouped_amax_count(spec, GroupSizes<int64_t>{x.rows, x.cols, groups.count}, direction);
}

/// Amaxes above the blocks of a direction, with zeros of groups without rows.
void measure(AmaxJob job, int64_t count, const Context& context) {
  fill(job.to, 0, count * static_cast<int64_t>(sizeof(uint32_t)), context);
  if (job.x.rows == 0 || job.x.cols == 0) return;
  launch(kMeasureAmax, grid_of_parts(job.spec, job.x, job.direction, job.groups), job, context);
}

/// A matrix that has as many rows as all of a list, for sizes alone.
Matrix all_of(const QuantizeProblem& p) {
  Matrix x = p.x;
  if (!p.each.empty()) x.dtype = p.each[0].dtype;
  return x;
}

/// One direction of a quantization that is asked for.
class SideOf {
 public:
  SideOf(const QuantizeProblem& problem, Direction direction, const Context& context)
      : p_(problem),
        direction_(direction),
        side_(direction == Direction::rowwise ? problem.rowwise : problem.columnwise),
        room_(problem.room.of(direction)),
        context_(context) {}

  void run(const Matrix* each) const {
    if (!side_.data && !side_.scale && !side_.amax) return;
    const Matrix x = all_of(p_);
    const Places groups =
        place_groups(p_.groups, x.rows, FlatGroups{p_.spec, direction_, x.cols, room_, p_.what}, context_);
    clear(groups);
    const float* const amaxes = amaxes_above(x, each, groups);
    const QuantizeJob job{.spec = p_.spec,
                          .x = x,
                          .direction = direction_,
                          .side = side_,
                          .random = p_.random,
                          .scale = p_.scale,
                          .amaxes = amaxes,
                          .groups = groups,
                          .each = each,
                          .only = p_.only};
    launch(kQuantizeAny, grid_of_parts(p_.spec, x, direction_, groups), job, context_);
  }

 private:
  /// Given or measured; null where the spec has none.
  const float* amaxes_above(const Matrix& x, const Matrix* each, const Places& groups) const {
    const int64_t count = amaxes_of(p_.spec, x, p_.groups, direction_);
    const float* const given = p_.amax.of(direction_);
    if (count == 0 || given) return given;
    auto* const measured = lend<uint32_t>(context_, count);
    measure({p_.spec, x, direction_, groups, each, measured}, count, context_);
    return reinterpret_cast<const float*>(measured);
  }

  /// What no thread writes is zero: padding, and what is left of flat buffers. Codes of groups that are left out stay
  /// what they are; nobody reads them.
  void clear(const Places& groups) const {
    const bool flat = !is_one(p_.groups), bytes = has_byte_scales(p_.spec);
    BufferCounts<int64_t> count = room_;
    if (!flat) count = counts(buffers<int64_t>(p_.spec, {p_.x.rows, p_.x.cols}, direction_));
    if (p_.spec.interleaved)
      fill(side_.data, 0, count[0], context_);
    else
      zero_rest(side_.data, count[0], groups, context_);
    if (flat || bytes) fill(side_.scale, 0, count[1] * (bytes ? 1 : 4), context_);
    if (flat) fill(side_.amax, 0, count[2] * 4, context_);
  }

  const QuantizeProblem& p_;
  const Direction direction_;
  const Side& side_;
  const BufferCounts<int64_t>& room_;
  const Context& context_;
};

/// The rules of values that the caller gives, each direction by itself.
void check_given(const QuantizeProblem& p, const Context& context) {
  GivenJob job{.scale = p.spec.given ? p.scale : nullptr,
               .scales = p.groups.count,
               .of_scale = fault_site(context, text("quantize: the static scale of ", p.spec)),
               .of_amax = fault_site(context, p.kOp)};
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    job.amaxes = p.amax.of(d), job.count = amaxes_of(p.spec, p.x, p.groups, d);
    if (job.scale || job.amaxes) launch(kCheckGiven, grid_of(std::max(job.scales, job.count)), job, context);
    job.scale = nullptr;
  }
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

void dequantize(const DequantizeProblem& p, const Context& context) {
  const Places groups =
      place_groups(p.groups, p.rows, FlatGroups{p.spec, p.direction, p.cols, p.room, p.what}, context);
  zero_beyond(p.out, groups, context);
  launch(kDequantizeAny, grid_of_groups(p.out.rows * p.out.cols, groups), DequantizeJob{p, groups}, context);
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
  check_given(p, context);
  const Matrix* const each = list_on_device(p.each, context);
  SideOf(p, Direction::rowwise, context).run(each);
  SideOf(p, Direction::columnwise, context).run(each);
}

constinit const Rows<QuantizeProblem> kQuantize{{{"reference", nullptr, quantize}}};
constinit const Rows<AmaxProblem> kAmax{{{"reference", nullptr, amax}}};
constinit const Rows<DequantizeProblem> kDequantize{{{"reference", nullptr, dequantize}}};
constinit const Rows<ReorderProblem> kReorder{{{"reference", nullptr, reorder}}};

}  // namespace quire::cuda
