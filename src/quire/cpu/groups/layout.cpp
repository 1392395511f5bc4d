#include "quire/cpu/groups/layout.h"

#include <cstring>

#include "quire/base/fault.h"

namespace quire::cpu {

Ends::Ends(const RowGroups& groups, int64_t rows, ListMemory& memory) : ends_(memory) {
  ends_.reserve(static_cast<size_t>(groups.count));
  const int64_t each = rows / groups.count;
  for (int64_t e = 0; e < groups.count; ++e) {
    ends_.push_back(groups.ends.data ? groups.ends[e] : (e + 1) * each);
    const auto group = static_cast<size_t>(e);
    if (begin(group) > ends_[group] || ends_[group] > rows)
      raise(groups.what, ValueRule::group_end,
            {.index = e, .value = ends_[group], .limit = rows, .more = {begin(group)}});
    filled_ += begin(group) < ends_[group];
  }
}

void zero(const MutableMatrix& m) {
  const auto width = static_cast<size_t>(m.cols * size_of(m.dtype));
  if (m.data == nullptr || width == 0) return;
  for (int64_t r = 0; r < m.rows; ++r)
    std::memset(static_cast<char*>(m.data) + r * m.row_stride * size_of(m.dtype), 0, width);
}

void zero_beyond(const MutableMatrix& m, const Ends& ends) {
  if (m.data == nullptr) return;
  zero({static_cast<char*>(m.data) + ends.end() * m.row_stride * size_of(m.dtype), m.dtype, m.rows - ends.end(), m.cols,
        m.row_stride});
}

namespace {

/// Elements of the buffers of each group. Neighbours often have as many rows, and most of few tokens' groups have none.
class CountsOf {
 public:
  explicit CountsOf(const GroupedLayout& layout) : layout_(layout) {}
  const BufferCounts<int64_t>& operator()(size_t group) {
    const int64_t rows = layout_.ends.rows(group);
    Known& known = rows == 0 ? none_ : last_;
    if (rows != known.rows)
      known = {rows, counts(buffers<int64_t>(layout_.spec, {rows, layout_.cols}, layout_.direction))};
    return known.counts;
  }

 private:
  struct Known {
    int64_t rows = -1;
    BufferCounts<int64_t> counts{};
  };
  const GroupedLayout& layout_;
  Known none_, last_;
};

/// Bytes of one element of data, scale and amax.
std::array<int64_t, 3> widths(const QuantSpec& spec) {
  return {1, spec.row().scale == ScaleKind::f32 ? int64_t{4} : 1, 4};
}

void check_room(const FlatSide& side, const GroupedLayout& layout, const BufferCounts<int64_t>& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (side.room[i] >= wanted[i]) continue;  // formatting costs more than a small product
    const std::string_view buffer = kBufferNames[first_buffer(layout.direction) + i];
    raise(text(layout.what, ": ", buffer, " of ", layout.spec), ValueRule::group_room,
          {.index = static_cast<int64_t>(i),
           .value = side.room[i],
           .limit = wanted[i],
           .more = {std::ssize(layout.ends), layout.ends.end(), layout.cols}});
  }
}

}  // namespace

CutSide sides_of(const FlatSide& side, const GroupedLayout& layout, ListMemory& memory) {
  std::array<char*, 3> next{static_cast<char*>(side.memory.data), static_cast<char*>(side.memory.scale),
                            reinterpret_cast<char*>(side.memory.amax)};
  const auto width = widths(layout.spec);
  CountsOf counts_of(layout);
  CutSide cut{std::pmr::vector<Side>(memory)};
  auto& [sides, all] = cut;
  sides.reserve(layout.ends.size());
  for (size_t e = 0; e < layout.ends.size(); ++e) {
    // A side is present by its codes, also where there are none.
    sides.push_back(Side{next[0], next[1], reinterpret_cast<float*>(next[2])}.with_sentinel_data());
    const BufferCounts<int64_t>& counts = counts_of(e);
    for (size_t i = 0; i < 3; ++i) {
      all[i] += counts[i];
      if (next[i]) next[i] += counts[i] * width[i];
    }
  }
  check_room(side, layout, all);
  return cut;
}

void clear_unwritten(const FlatSide& side, const QuantSpec& spec, const BufferCounts<int64_t>& taken) {
  if (!side.present()) return;
  const auto clear = [](void* data, int64_t begin, int64_t end) {
    if (begin < end) std::memset(static_cast<char*>(data) + begin, 0, static_cast<size_t>(end - begin));
  };
  const auto width = widths(spec);
  clear(side.memory.data, taken[0], side.room[0]);
  // All of these: groups without rows are not quantized.
  clear(side.memory.scale, 0, side.room[1] * width[1]);
  clear(side.memory.amax, 0, side.room[2] * width[2]);
}

CutOperand::CutOperand(const Operand& operand, ListMemory& memory)
    : operand_(operand), ends_(operand.groups, operand.rows(), memory), sides_(memory) {
  // Those that an operand reads are not written.
  const Side all{const_cast<void*>(operand.data), const_cast<void*>(operand.scale), const_cast<float*>(operand.amax)};
  const GroupedLayout layout{operand.spec, operand.direction, ends_, operand.cols(), operand.what};
  if (!operand.each.empty())
    sides_.assign(operand.each.begin(), operand.each.end());
  else if (is_one(operand.groups))
    sides_ = {all};
  else
    sides_ = sides_of({all, operand.room}, layout, memory).sides;
}

Operand CutOperand::operator[](size_t group) const {
  const bool rowwise = operand_.direction == Direction::rowwise;
  const int64_t rows = ends_.rows(group);
  const Side& side = sides_[group];
  return {.spec = operand_.spec,
          .direction = operand_.direction,
          .outer = rowwise ? rows : operand_.cols(),
          .contraction = rowwise ? operand_.cols() : columnwise_tokens(operand_.spec, rows),
          .data = side.data,
          .scale = side.scale,
          .amax = side.amax};
}

DequantizeProblem CutOperand::decoded(size_t group, const MutableMatrix& out) const {
  const Side& side = sides_[group];
  return {.spec = operand_.spec,
          .direction = operand_.direction,
          .rows = ends_.rows(group),
          .cols = operand_.cols(),
          .data = side.data,
          .scale = side.scale,
          .amax = side.amax,
          .out = out};
}

}  // namespace quire::cpu
