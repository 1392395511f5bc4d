#include "quire/cuda/trial.h"

#include "quire/cuda/kernels/self_check.h"
#include "quire/cuda/launch.h"
#include "quire/cuda/rows.h"
#include "quire/spec/scale_index.h"

namespace quire::cuda {
namespace {

constinit const Kernel kDrawValues{"self_check", "draw_values"};
constinit const Kernel kDrawIds{"self_check", "draw_ids"};
constinit const Kernel kDrawEnds{"self_check", "draw_ends"};
constinit const Kernel kClearBits{"self_check", "clear_bits"};
constinit const Kernel kCountDiffering{"self_check", "count_differing"};

/// Groups of a small problem that has some.
constexpr int64_t kGroups = 2;

int64_t width_of_scale(const QuantSpec& spec) { return has_byte_scales(spec) ? 1 : sizeof(float); }

}  // namespace

void* Trial::lent(int64_t bytes) const { return lend<std::byte>(terms.context, bytes); }

void* Trial::values(DType dtype, int64_t count, bool positive) {
  void* const to = lent(count * size_of(dtype));
  if (count > 0) launch(kDrawValues, grid_of(count), DrawJob{to, dtype, count, ++seed_, positive}, terms.context);
  return to;
}

Matrix Trial::matrix(DType dtype, int64_t rows, int64_t cols) {
  return {values(dtype, rows * cols), dtype, rows, cols, cols};
}

Vector Trial::vector(const Vector& like, int64_t count) {
  return {like.data ? values(like.dtype, count) : nullptr, like.dtype};
}

int32_t* Trial::ids(int64_t tokens, int64_t slots, int64_t experts) {
  auto* const to = static_cast<int32_t*>(lent(tokens * slots * static_cast<int64_t>(sizeof(int32_t))));
  launch(kDrawIds, grid_of(tokens * slots), DrawIdsJob{to, tokens * slots, slots, experts}, terms.context);
  return to;
}

RowGroups Trial::groups(const RowGroups& like, int64_t rows) {
  if (is_one(like)) return {};
  RowGroups groups = RowGroups::equal(kGroups, rows / kGroups);
  if (!like.ends.data) return groups;
  void* const ends = lent(kGroups * static_cast<int64_t>(sizeof(int64_t)));
  launch(kDrawEnds, grid_of(kGroups), DrawEndsJob{ends, kGroups, rows / kGroups, like.ends.wide}, terms.context);
  groups.ends = {ends, kGroups, like.ends.wide};
  return groups;
}

void* Trial::output(DType dtype, int64_t count) {
  void* const to = lent(count * size_of(dtype));
  fill(to, 0, count * size_of(dtype), terms.context);
  outputs_.push_back({to, dtype, count});
  return to;
}

MutableMatrix Trial::output(DType dtype, int64_t rows, int64_t cols) {
  return {output(dtype, rows * cols), dtype, rows, cols, cols};
}

Side Trial::side(const BufferCounts<int64_t>& counts, const QuantSpec& spec, bool is_output) {
  const auto memory = [&](int64_t bytes) { return is_output ? output(DType::u8, bytes) : lent(bytes); };
  return {memory(counts[0]), memory(counts[1] * width_of_scale(spec)),
          static_cast<float*>(memory(counts[2] * static_cast<int64_t>(sizeof(float))))};
}

Operand Trial::operand(const Operand& like, int64_t outer, int64_t contraction, const RowGroups& groups) {
  const bool rowwise = like.direction == Direction::rowwise, one = is_one(groups);
  const int64_t rows = rowwise ? outer : contraction, cols = rowwise ? contraction : outer;
  const BufferCounts<int64_t> count =
      one ? counts(buffers<int64_t>(like.spec, {rows, cols}, like.direction))
          : grouped_counts<int64_t>(like.spec, {rows, cols, groups.count}, like.direction);
  QuantizeProblem q;
  q.spec = like.spec, q.x = matrix(DType::f32, rows, cols), q.groups = groups;
  const Side memory = side(count, like.spec, false);
  (rowwise ? q.rowwise : q.columnwise) = memory;
  (rowwise ? q.room.rowwise : q.room.columnwise) = count;
  if (like.spec.given) q.scale = static_cast<const float*>(values(DType::f32, groups.count, true));
  kQuantize.back().run(q, terms.context);
  if (terms.wanted == Wanted::magnitude)
    launch(kClearBits, grid_of(count[0]),
           ClearJob{static_cast<uint8_t*>(memory.data), count[0], like.spec.packed() ? uint8_t{0x77} : uint8_t{0x7F}},
           terms.context);
  return {.spec = like.spec,
          .direction = like.direction,
          .outer = outer,
          .contraction = rowwise || !one ? contraction : columnwise_tokens(like.spec, contraction),
          .data = memory.data,
          .scale = memory.scale,
          .amax = memory.amax,
          .groups = groups,
          .room = count};
}

uint32_t Trial::differing(const Trial& expected, const Trial* magnitudes, float tolerance) const {
  auto* const count = static_cast<uint32_t*>(lent(sizeof(uint32_t)));
  fill(count, 0, sizeof(uint32_t), terms.context);
  constexpr float largest_drawn = 8;  // of a bias, and of an addend
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const Output& one = outputs_[i];
    const bool bytes = !magnitudes;
    const DifferJob job{.found = one.data,
                        .expected = expected.outputs_[i].data,
                        .dtype = bytes ? DType::u8 : one.dtype,
                        .count = bytes ? one.count * size_of(one.dtype) : one.count,
                        .magnitudes = bytes ? nullptr : static_cast<const float*>(magnitudes->outputs_[i].data),
                        .tolerance = tolerance,
                        .offset = 2 * largest_drawn,
                        .differing = count};
    if (job.count > 0) launch(kCountDiffering, grid_of(job.count), job, terms.context);
  }
  uint32_t found = 0;
  driver().read(&found, count, sizeof found, terms.context);
  return found;
}

}  // namespace quire::cuda
