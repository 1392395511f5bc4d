#include "quire_torch/ops/groups.h"

#include <cstring>

#include "quire/quantize/quantize.h"

namespace quire_torch {

using quire::check, quire::Direction;

int64_t group_count(const at::Tensor& offsets, const char* what) {
  const bool integers = offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong;
  check(integers && offsets.dim() == 1, what,
        ": offsets must be an int32 or int64 vector with the end of each group, got ", offsets.scalar_type(), " with ",
        offsets.dim(), " dimensions");
  const int64_t count = offsets.sym_size(0).guard_int(__FILE__, __LINE__);
  check(count > 0, what, ": offsets must have the end of at least one group, got none");
  return count;
}

Groups::Groups(const at::Tensor& offsets, int64_t tokens, const char* what) {
  group_count(offsets, what);
  const at::Tensor ends = offsets.to(at::kLong).contiguous();
  const int64_t* p = ends.const_data_ptr<int64_t>();
  ends_.assign(p, p + ends.size(0));
  for (size_t e = 0; e < ends_.size(); ++e)
    check(rows(e) >= 0 && ends_[e] <= tokens, what, ": offsets must not decrease and be from 0 to ", tokens,
          ", the number of rows of x; group ", e, " ends at ", ends_[e], ", the one before at ", begin(e),
          "; give the cumulative sum of the groups' sizes");
}

Groups Groups::equal(int64_t count, int64_t rows) {
  Groups g;
  for (int64_t e = 1; e <= count; ++e) g.ends_.push_back(e * rows);
  return g;
}

std::vector<quire::Matrix> rows_of(const quire::Matrix& m, const Groups& groups) {
  std::vector<quire::Matrix> out;
  for (size_t e = 0; e < groups.size(); ++e) {
    const auto* data = static_cast<const char*>(m.data);
    const int64_t at = groups.begin(e) * m.row_stride * size_of(m.dtype);
    out.push_back({data == nullptr ? nullptr : data + at, m.dtype, groups.rows(e), m.cols, m.row_stride});
  }
  return out;
}

quire::MutableMatrix rows_of(const quire::MutableMatrix& m, const Groups& groups, size_t group) {
  auto* data = static_cast<char*>(m.data) + groups.begin(group) * m.cols * size_of(m.dtype);
  return {data, m.dtype, groups.rows(group), m.cols, m.cols};
}

void zero_beyond(at::Tensor& t, const Groups& groups) {
  const quire::MutableMatrix m = mutable_matrix(t);
  const auto width = static_cast<size_t>(m.cols * size_of(m.dtype));
  const auto rows = static_cast<size_t>(m.rows - groups.end());
  if (rows * width > 0)
    std::memset(static_cast<char*>(m.data) + static_cast<size_t>(groups.end()) * width, 0, rows * width);
}

namespace {

/// Elements of the buffers of each group; neighbours often have as many rows.
class CountsOf {
 public:
  explicit CountsOf(const GroupedLayout& layout) : layout_(layout) {}
  const quire::BufferCounts<int64_t>& operator()(size_t group) {
    const int64_t rows = layout_.groups.rows(group);
    if (rows != rows_)
      counts_ = quire::counts(quire::buffers<int64_t>(layout_.spec, {rows, layout_.k}, layout_.direction));
    rows_ = rows;
    return counts_;
  }

 private:
  const GroupedLayout& layout_;
  int64_t rows_ = -1;
  quire::BufferCounts<int64_t> counts_{};
};

std::array<at::ScalarType, 3> dtypes_of(const quire::QuantSpec& spec) {
  return {at::kByte, spec.row().scale == quire::ScaleKind::f32 ? at::kFloat : at::kByte, at::kFloat};
}

/// Throws unless the buffers hold so many elements.
void check_held(std::span<const at::Tensor> three, const GroupedLayout& layout,
                const quire::BufferCounts<int64_t>& wanted, const char* what) {
  const auto dtypes = dtypes_of(layout.spec);
  for (size_t i = 0; i < 3; ++i) {
    const bool there = three[i].defined() && three[i].numel() > 0;
    const bool fits =
        there ? three[i].scalar_type() == dtypes[i] && three[i].is_contiguous() && three[i].numel() >= wanted[i]
              : wanted[i] == 0;
    if (fits) continue;  // formatting costs more than a small product
    quire::fail(what, ": ", quire::kBufferNames[quire::first_buffer(layout.direction) + i], " of ",
                layout.spec.to_string(), " for ", layout.groups.size(), " groups of ", layout.groups.end(), " rows of ",
                layout.k, " must hold ", wanted[i], " contiguous ", dtypes[i], ", got ",
                there ? quire::text(three[i].scalar_type(), " ", three[i].sizes()) : "nothing",
                "; pass what the forward operator returned");
  }
}

}  // namespace

std::vector<quire::Side> grouped_sides(std::span<const at::Tensor> three, const GroupedLayout& layout,
                                       const char* what) {
  std::array<char*, 3> next{};
  std::array<int64_t, 3> width{};
  for (size_t i = 0; i < 3; ++i) {
    if (!three[i].defined() || three[i].numel() == 0) continue;
    next[i] = static_cast<char*>(three[i].mutable_data_ptr());
    width[i] = three[i].element_size();
  }
  CountsOf counts_of(layout);
  quire::BufferCounts<int64_t> all{};
  std::vector<quire::Side> sides;
  sides.reserve(layout.groups.size());
  for (size_t e = 0; e < layout.groups.size(); ++e) {
    // A side is present by its codes, also where there are none.
    sides.push_back(quire::Side{next[0], next[1], reinterpret_cast<float*>(next[2])}.marked());
    const auto& counts = counts_of(e);
    for (size_t i = 0; i < 3; ++i) {
      all[i] += counts[i];
      if (next[i]) next[i] += counts[i] * width[i];
    }
  }
  check_held(three, layout, all, what);
  return sides;
}

const float* group_scales(const std::optional<at::Tensor>& scale, int64_t slots, int64_t groups, int64_t slot,
                          const char* what) {
  if (!scale) return nullptr;
  quire::check(scale->scalar_type() == at::kFloat && scale->numel() == slots * groups && scale->is_contiguous(), what,
               " must be contiguous float32 of size [", slots * groups, "], got ", scale->scalar_type(), " ",
               scale->sizes());
  return scale->const_data_ptr<float>() + slot * groups;
}

std::vector<quire::Side> given_sides(const op::OptionalTensorList& buffers, const GroupedLayout& layout, int64_t rows,
                                     const char* what) {
  const bool rowwise = layout.direction == Direction::rowwise;
  const size_t first = quire::first_buffer(layout.direction);
  // Those of one group have shapes of their own where a caller gives them, and are flat where forward returned them.
  if (buffers.size() == 6 && (layout.groups.size() > 1 || (buffers[first] && buffers[first]->dim() == 1))) {
    std::array<at::Tensor, 3> three;
    for (size_t i = 0; i < 3; ++i) three[i] = buffers[first + i].value_or(at::Tensor());
    return grouped_sides(three, layout, what);
  }
  check(buffers.size() == 6 * layout.groups.size(), what, " must be given as the six buffers of quire.TensorProto for ",
        "each of ", layout.groups.size(), " groups, or six flat ones of all; got ", buffers.size());
  const QuantizeRole role{.what = what, .role = "w", .spec = layout.spec, .rowwise = rowwise, .columnwise = !rowwise};
  std::vector<quire::Side> sides;
  for (auto six = buffers.begin(); six != buffers.end(); six += 6)
    sides.push_back(side(given_operand({six, six + 6}, {rows, layout.k}, role), layout.direction));
  return sides;
}

quire::Operand grouped_operand(const std::vector<quire::Side>& sides, const GroupedLayout& layout, size_t group) {
  const bool rowwise = layout.direction == Direction::rowwise;
  const int64_t rows = layout.groups.rows(group);
  return {.spec = layout.spec,
          .direction = layout.direction,
          .outer = rowwise ? rows : layout.k,
          .contraction = rowwise ? layout.k : quire::columnwise_tokens(layout.spec, rows),
          .data = sides[group].data,
          .scale = sides[group].scale,
          .amax = sides[group].amax};
}

void decode_group(const GroupCodes& codes, const quire::MutableMatrix& out, const quire::Context& context) {
  const auto& [sides, layout, group] = codes;
  if (layout.groups.rows(group) == 0) return;
  quire::dequantize({.spec = layout.spec,
                     .direction = layout.direction,
                     .rows = layout.groups.rows(group),
                     .cols = layout.k,
                     .data = sides[group].data,
                     .scale = sides[group].scale,
                     .amax = sides[group].amax,
                     .out = out},
                    context);
}

namespace {

/// Elements of the buffers that these groups need.
quire::BufferCounts<int64_t> used_counts(const GroupedLayout& layout) {
  CountsOf counts_of(layout);
  quire::BufferCounts<int64_t> used{};
  for (size_t e = 0; e < layout.groups.size(); ++e)
    for (size_t i = 0; i < 3; ++i) used[i] += counts_of(e)[i];
  return used;
}

/// Buffers of one direction: the operator's results where they are kept, else as large as these groups need.
std::array<at::Tensor, 3> fresh_buffers(const GroupedRole& q, const GroupedLayout& layout) {
  const auto used = used_counts(layout);
  const bool kept = q.kept == layout.direction;
  const auto dtypes = dtypes_of(q.spec);
  std::array<at::Tensor, 3> out;
  for (size_t i = 0; i < 3; ++i) {
    const bool result = kept || (i == 2 && q.scale);
    out[i] = result ? q.results[i] : op::allocate(at::IntArrayRef({used[i]}), q.results[i].options().dtype(dtypes[i]));
  }
  clear_unwritten(out, layout);
  return out;
}

}  // namespace

void clear_unwritten(std::span<const at::Tensor> three, const GroupedLayout& layout) {
  const int64_t used = used_counts(layout)[0], rest = three[0].numel() - used;
  if (rest > 0) std::memset(static_cast<char*>(three[0].mutable_data_ptr()) + used, 0, static_cast<size_t>(rest));
  for (const at::Tensor& t : three.subspan(1)) t.zero_();  // groups without rows are not quantized
}

GroupedCodes quantize_groups(const std::vector<quire::Matrix>& matrices, const Groups& groups, int64_t k,
                             const GroupedRole& q, const quire::Context& context) {
  GroupedCodes codes;
  if (q.rowwise) {
    const GroupedLayout layout{q.spec, groups, k, Direction::rowwise};
    codes.rowwise = fresh_buffers(q, layout);
    codes.rows = grouped_sides(codes.rowwise, layout, q.what);
  }
  if (q.columnwise) {
    const GroupedLayout layout{q.spec, groups, k, Direction::columnwise};
    codes.columnwise = fresh_buffers(q, layout);
    codes.columns = grouped_sides(codes.columnwise, layout, q.what);
  }
  std::vector<quire::QuantizeProblem> problems;
  for (size_t e = 0; e < matrices.size(); ++e) {
    if (matrices[e].rows == 0 || !(q.rowwise || q.columnwise)) continue;
    quire::Randomness random = q.random;
    random.seed += e;
    problems.push_back({.spec = q.spec,
                        .x = matrices[e],
                        .rowwise = q.rowwise ? codes.rows[e] : quire::Side{},
                        .columnwise = q.columnwise ? codes.columns[e] : quire::Side{},
                        .random = random,
                        .scale = q.scale ? q.scale + e : nullptr,
                        .role = q.role});
  }
  quire::quantize_each(problems, context);
  return codes;
}

}  // namespace quire_torch
