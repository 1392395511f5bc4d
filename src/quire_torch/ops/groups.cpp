#include "quire_torch/ops/groups.h"

#include "quire/quantize/quantize.h"

namespace quire_torch {

using quire::check, quire::Direction;

int64_t group_count(const at::Tensor& offsets, const at::Tensor& x, const char* what) {
  const bool integers = offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong;
  check(integers && offsets.dim() == 1, what,
        ": offsets must be an int32 or int64 vector with the end of each group, got ", offsets.scalar_type(), " with ",
        offsets.dim(), " dimensions");
  check(offsets.device() == x.device(), what, ": offsets and x must be on one device; got ", offsets.device(), " and ",
        x.device(), "; move one with .to()");
  const int64_t count = offsets.sym_size(0).guard_int(__FILE__, __LINE__);
  check(count > 0, what, ": offsets must have the end of at least one group, got none");
  return count;
}

at::Tensor member(const op::TensorList& list, size_t group, int64_t rank) {
  return list[0].dim() > rank ? list[0].select(0, static_cast<int64_t>(group)) : list[group];
}

MatrixList::MatrixList(const op::TensorList& list, int64_t groups, const char* what) {
  for (size_t e = 0; e < static_cast<size_t>(groups); ++e)
    matrices_.push_back(views_.emplace_back(member(list, e, 2), what).matrix());
}

BiasList::BiasList(const op::TensorList& list, int64_t groups, const char* what) {
  for (size_t e = 0; e < static_cast<size_t>(groups) && !list.empty(); ++e) {
    const quire::Matrix& m = views_.emplace_back(member(list, e, 1), what).matrix();
    vectors_.push_back({m.data, m.dtype});
  }
}

std::vector<quire::MutableMatrix> mutable_matrices(const op::TensorList& list, int64_t groups) {
  std::vector<quire::MutableMatrix> out;
  for (size_t e = 0; e < static_cast<size_t>(groups); ++e) {
    at::Tensor one = member(list, e, 2);
    out.push_back(mutable_matrix(one));
  }
  return out;
}

quire::GroupedSide flat_side(std::span<const at::Tensor> three, const quire::QuantSpec& spec, Direction direction,
                             const char* what) {
  const std::array dtypes{at::kByte, spec.row().scale == quire::ScaleKind::f32 ? at::kFloat : at::kByte, at::kFloat};
  quire::GroupedSide out;
  std::array<void*, 3> memory{};
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor& t = three[i];
    if (!t.defined() || t.numel() == 0) continue;
    if (t.scalar_type() != dtypes[i] || !t.is_contiguous())
      quire::fail(what, ": ", quire::kBufferNames[quire::first_buffer(direction) + i], " of ", spec.to_string(),
                  " must be contiguous ", dtypes[i], ", got ", t.scalar_type(), " ", t.sizes(),
                  "; pass what the forward operator returned");
    memory[i] = t.mutable_data_ptr();
    out.room[i] = t.numel();
  }
  out.flat = {memory[0], memory[1], static_cast<float*>(memory[2])};
  return out;
}

const float* group_scales(const std::optional<at::Tensor>& scale, int64_t slots, int64_t groups, int64_t slot,
                          const char* what) {
  if (!scale) return nullptr;
  check(scale->scalar_type() == at::kFloat && scale->numel() == slots * groups && scale->is_contiguous(), what,
        " must be contiguous float32 of size [", slots * groups, "], got ", scale->scalar_type(), " ", scale->sizes());
  return scale->const_data_ptr<float>() + slot * groups;
}

GivenOperand::GivenOperand(const op::OptionalTensorList& buffers, const GivenGroups& groups, const char* what) {
  const auto& [spec, direction, count, rows, cols] = groups;
  operand_ = {.spec = spec,
              .direction = direction,
              .groups = quire::RowGroups::equal(count, rows),
              .cols = cols,
              .side = {},
              .what = what};
  const size_t first = quire::first_buffer(direction);
  // Those of one group have shapes of their own where a caller gives them, and are flat where forward returned them.
  if (buffers.size() == 6 && (count > 1 || (buffers[first] && buffers[first]->dim() == 1))) {
    std::array<at::Tensor, 3> three;
    for (size_t i = 0; i < 3; ++i) three[i] = buffers[first + i].value_or(at::Tensor());
    operand_.side = flat_side(three, spec, direction, what);
    return;
  }
  check(static_cast<int64_t>(buffers.size()) == 6 * count, what, " must be given as the six buffers of ",
        "quire.TensorProto for each of ", count, " groups, or six flat ones of all; got ", buffers.size());
  const bool rowwise = direction == Direction::rowwise;
  const QuantizeRole role{.what = what, .role = "w", .spec = spec, .rowwise = rowwise, .columnwise = !rowwise};
  for (auto six = buffers.begin(); six != buffers.end(); six += 6)
    each_.push_back(side(given_operand({six, six + 6}, {rows, cols}, role), direction));
  operand_.side.each = each_;
}

quire::GroupedSide GroupedCodes::allocate(Direction direction, const GroupedRole& q) {
  const bool kept = q.kept == direction;
  const size_t first = quire::first_buffer(direction);
  const auto of_all =
      groups_.ends.data
          ? grouped_results<int64_t>(spec_, {groups_.rows, cols_, groups_.count}, direction, true)
          : stacked_results<int64_t>(spec_, {groups_.rows / groups_.count, cols_}, groups_.count, direction, true);
  for (size_t i = 0; i < 3; ++i) {
    const bool result = kept || (i == 2 && q.scale);
    buffers_[first + i] =
        result ? q.results[i] : op::allocate(sizes(of_all[i]), q.results[i].options().dtype(of_all[i].dtype));
  }
  return flat_side(std::span(buffers_).subspan(first, 3), spec_, direction, q.what);
}

GroupedCodes::GroupedCodes(const quire::GroupedMatrix& x, const quire::RowGroups& groups, int64_t cols,
                           const GroupedRole& q, const quire::Context& context)
    : spec_(q.spec), groups_(groups), cols_(cols), what_(q.what) {
  if (q.rowwise) rowwise_ = allocate(Direction::rowwise, q);
  if (q.columnwise) columnwise_ = allocate(Direction::columnwise, q);
  quire::grouped_quantize(
      {.spec = spec_,
       .x = x,
       .groups = groups_,
       .rowwise = rowwise_,
       .columnwise = columnwise_,
       .random = q.random,
       .scale = q.scale,
       .amax = {.rowwise = q.rowwise ? q.amax : nullptr, .columnwise = q.columnwise ? q.amax : nullptr},
       .only = q.only,
       .role = q.role,
       .what = q.what},
      context);
}

quire::GroupedOperand GroupedCodes::operand(Direction direction) const {
  return {.spec = spec_,
          .direction = direction,
          .groups = groups_,
          .cols = cols_,
          .side = direction == Direction::rowwise ? rowwise_ : columnwise_,
          .what = what_};
}

}  // namespace quire_torch
