#include "quire_torch/ops/operands.h"

#include "quire/operations/operations.h"

namespace quire_torch {

using quire::check, quire::Direction;

BufferTensors given_buffers(const op::OptionalTensorList& buffers, const Stored& stored, const char* what) {
  BufferTensors b;
  quire::check(buffers.size() == b.size(), what, "'s buffers must be the six of quire.TensorProto, got ",
               buffers.size());
  for (size_t i = 0; i < b.size(); ++i)
    if (buffers[i]) b[i] = *buffers[i];
  check_buffers(b, stored.spec, stored.shape, stored.direction, what);
  // Those that are for backward are not refused as late as there.
  if (stored.direction == Direction::rowwise && b[3].defined() && b[3].numel() > 0)
    check_saved({b[3], b[4], b[5]}, {stored.spec, Direction::columnwise, stored.shape}, what);
  return b;
}

void check_saved(const std::array<at::Tensor, 3>& three, const Stored& stored, const char* what) {
  const auto expected = results(stored.spec, stored.shape, stored.direction, true);
  for (size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& t = three[i];
    const quire::Shape<int64_t> sizes(expected[i].sizes.begin(), expected[i].sizes.end());
    const int64_t count = quire::product(sizes, 0, sizes.size());
    const bool absent = count == 0 && (!t.defined() || t.numel() == 0);
    if (absent || (t.defined() && t.scalar_type() == expected[i].dtype && t.is_contiguous() && t.numel() == count))
      continue;
    quire::fail(what, " does not fit its spec: ", quire::kBufferNames[quire::first_buffer(stored.direction) + i],
                " of ", stored.spec.to_string(), " for shape ", at::IntArrayRef(stored.shape), " must hold ", count,
                " contiguous ", expected[i].dtype, ", got ",
                t.defined() ? quire::text(t.scalar_type(), " ", t.sizes()) : "nothing", "; see quire.TensorProto");
  }
}

int64_t group_count(const op::OptionalTensor& offsets, const at::Tensor& x, const char* what) {
  if (!offsets) return 1;
  const bool integers = offsets->scalar_type() == at::kInt || offsets->scalar_type() == at::kLong;
  check(integers && offsets->dim() == 1, what,
        ": offsets must be an int32 or int64 vector with the end of each group, got ", offsets->scalar_type(), " with ",
        offsets->dim(), " dimensions");
  check_one_device(offsets->device(), x.device(), what, ": offsets and x");
  const int64_t count = offsets->sym_size(0).guard_int(__FILE__, __LINE__);
  check(count > 0, what, ": offsets must have the end of at least one group, got none");
  return count;
}

at::Tensor member(const op::TensorList& list, size_t group, int64_t rank) {
  return list.size() == 1 && list[0].dim() > rank ? list[0].select(0, static_cast<int64_t>(group)) : list[group];
}

namespace {

/// Whether one tensor has what is of rank `rank` in each group, stacked if there are several.
bool is_of_all(const op::TensorList& list, int64_t groups, int64_t rank) {
  return list.size() == 1 && (groups == 1 || list[0].dim() > rank);
}

/// A vector seen as a matrix of one row.
quire::Vector vector_of(const MatrixView& view) { return {view.matrix().data, view.matrix().dtype}; }

/// A list of matrices of one size as one that has no memory.
template <class Matrices>
auto without_memory(const Matrices& list) {
  auto all = list[0];
  all.data = nullptr;
  all.rows = quire::times(all.rows, static_cast<int64_t>(list.size()));
  all.row_stride = all.cols;
  return all;
}

}  // namespace

GroupMatrices::GroupMatrices(const op::TensorList& list, int64_t groups, const char* what) {
  if (groups == 1 || (is_of_all(list, groups, 2) && MatrixView::takes(list[0])))
    all_ = views_.emplace_back(list[0], what).matrix();
  else
    take_each(list, groups, what);
}

void GroupMatrices::take_each(const op::TensorList& list, int64_t groups, const char* what) {
  for (size_t e = 0; e < static_cast<size_t>(groups); ++e)
    matrices_.push_back(views_.emplace_back(member(list, e, 2), what).matrix());
  all_ = without_memory(matrices_);
}

GroupBiases::GroupBiases(const op::TensorList& list, int64_t groups, const char* what) {
  if (list.empty()) return;
  if (groups == 1 || (is_of_all(list, groups, 1) && list[0].is_contiguous()))
    all_ = vector_of(views_.emplace_back(list[0], what));
  else
    take_each(list, groups, what);
}

void GroupBiases::take_each(const op::TensorList& list, int64_t groups, const char* what) {
  for (size_t e = 0; e < static_cast<size_t>(groups); ++e)
    vectors_.push_back(vector_of(views_.emplace_back(member(list, e, 1), what)));
}

MutableGroupMatrices::MutableGroupMatrices(const op::TensorList& list, int64_t groups) {
  if (is_of_all(list, groups, 2) && list[0].is_contiguous()) {
    at::Tensor all = list[0];
    all_ = mutable_matrix(all);
    return;
  }
  for (size_t e = 0; e < static_cast<size_t>(groups); ++e) {
    at::Tensor one = member(list, e, 2);
    matrices_.push_back(mutable_matrix(one));
  }
  all_ = without_memory(matrices_);
}

template <class Int>
std::array<op::Result<Int>, 3> grouped_results(const quire::QuantSpec& spec, const quire::GroupSizes<Int>& sizes,
                                               quire::Direction direction, bool wanted) {
  if (!wanted) return results<Int>(spec, {}, direction, false);
  const auto counts = quire::grouped_counts(spec, sizes, direction);
  const auto scale = spec.row().scale == quire::ScaleKind::f32 ? at::kFloat : at::kByte;
  return {op::Result<Int>{{counts[0]}, at::kByte}, op::Result<Int>{{counts[1]}, scale},
          op::Result<Int>{{counts[2]}, at::kFloat}};
}

template <class Int>
std::array<op::Result<Int>, 3> stacked_results(const quire::QuantSpec& spec, const quire::Shape<Int>& matrix,
                                               int64_t groups, quire::Direction direction, bool wanted) {
  auto r = results(spec, matrix, direction, wanted);
  if (!wanted) return r;
  for (auto& one : r) {
    const quire::Shape<Int> sizes(one.sizes.begin(), one.sizes.end());
    one.sizes = {quire::times(quire::product(sizes, 0, sizes.size()), Int(groups))};
  }
  return r;
}

template <class Int>
std::array<op::Result<Int>, 3> rows_results(const quire::QuantSpec& spec, const quire::GroupSizes<Int>& sizes,
                                            bool has_offsets, quire::Direction direction, bool wanted) {
  return has_offsets ? grouped_results<Int>(spec, sizes, direction, wanted)
                     : stacked_results<Int>(spec, {sizes.tokens, sizes.k}, 1, direction, wanted);
}

template std::array<op::Result<int64_t>, 3> grouped_results(const quire::QuantSpec&, const quire::GroupSizes<int64_t>&,
                                                            Direction, bool);
template std::array<op::Result<int64_t>, 3> stacked_results(const quire::QuantSpec&, const quire::Shape<int64_t>&,
                                                            int64_t, Direction, bool);
template std::array<op::Result<int64_t>, 3> rows_results(const quire::QuantSpec&, const quire::GroupSizes<int64_t>&,
                                                         bool, Direction, bool);
template std::array<op::Result<c10::SymInt>, 3> grouped_results(const quire::QuantSpec&,
                                                                const quire::GroupSizes<c10::SymInt>&, Direction, bool);
template std::array<op::Result<c10::SymInt>, 3> stacked_results(const quire::QuantSpec&,
                                                                const quire::Shape<c10::SymInt>&, int64_t, Direction,
                                                                bool);
template std::array<op::Result<c10::SymInt>, 3> rows_results(const quire::QuantSpec&,
                                                             const quire::GroupSizes<c10::SymInt>&, bool, Direction,
                                                             bool);

FlatBuffers flat_side(std::span<const at::Tensor> three, const quire::QuantSpec& spec, Direction direction,
                      const char* what) {
  const std::array dtypes{at::kByte, spec.row().scale == quire::ScaleKind::f32 ? at::kFloat : at::kByte, at::kFloat};
  FlatBuffers out;
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
  out.side = {memory[0], memory[1], static_cast<float*>(memory[2])};
  return out;
}

const float* group_scales(const std::optional<at::Tensor>& scale, int64_t slots, int64_t groups, int64_t slot,
                          const char* what) {
  if (!scale) return nullptr;
  check(scale->scalar_type() == at::kFloat && scale->numel() == slots * groups && scale->is_contiguous(), what,
        " must be contiguous float32 of size [", slots * groups, "], got ", scale->scalar_type(), " ", scale->sizes());
  return scale->const_data_ptr<float>() + slot * groups;
}

namespace {

/// The operand of groups, without memory.
quire::Operand operand_of(const GivenGroups& given, const char* what) {
  const auto& [spec, direction, groups, cols, shape] = given;
  const bool rowwise = direction == Direction::rowwise;
  const int64_t contracted = quire::is_one(groups) ? quire::columnwise_tokens(spec, groups.rows) : groups.rows;
  return {.spec = spec,
          .direction = direction,
          .outer = rowwise ? groups.rows : cols,
          .contraction = rowwise ? cols : contracted,
          .groups = groups,
          .what = what};
}

quire::Operand with_side(quire::Operand operand, const FlatBuffers& from) {
  const auto& [data, scale, amax] = from.side;
  operand.data = data, operand.scale = scale, operand.amax = amax, operand.room = from.room;
  return operand;
}

}  // namespace

GivenOperand::GivenOperand(const op::OptionalTensorList& buffers, const GivenGroups& given, const char* what)
    : operand_(operand_of(given, what)) {
  const auto& [spec, direction, groups, cols, shape] = given;
  const size_t first = quire::first_buffer(direction);
  const bool grouped = groups.ends.data != nullptr;
  // Those of one group have shapes of their own where a caller gives them, and are flat where forward returned them.
  const bool flat = grouped || groups.count > 1 ||
                    (buffers.size() == 6 && buffers[first] && shape.size() > 1 && buffers[first]->dim() == 1);
  if (buffers.size() == 6 && flat) {
    std::array<at::Tensor, 3> three;
    for (size_t i = 0; i < 3; ++i) three[i] = buffers[first + i].value_or(at::Tensor());
    check(!grouped || (three[0].defined() && three[1].defined()), what, " is given without ",
          quire::kBufferNames[first], "; quantize it in that direction");
    operand_ = with_side(operand_, flat_side(three, spec, direction, what));
    if (quire::is_one(groups) && three[0].defined()) check_saved(three, {spec, direction, shape}, what);
    // Those that are for backward are not refused as late as there.
    const std::array<at::Tensor, 3> columnwise{buffers[3].value_or(at::Tensor()), buffers[4].value_or(at::Tensor()),
                                               buffers[5].value_or(at::Tensor())};
    if (direction == Direction::columnwise || !columnwise[0].defined() || columnwise[0].numel() == 0) return;
    if (groups.count > 1 || grouped)
      flat_side(columnwise, spec, Direction::columnwise, what);
    else
      check_saved(columnwise, {spec, Direction::columnwise, shape}, what);
    return;
  }
  check(!grouped && (groups.count == 1 || static_cast<int64_t>(buffers.size()) == 6 * groups.count), what,
        " must be given as the six buffers of quire.TensorProto for each of ", groups.count,
        " groups, or six flat ones of all; got ", buffers.size());
  if (groups.count == 1) {
    operand_ = with_side(operand_, {side(given_buffers(buffers, {spec, direction, shape}, what), direction)});
    return;
  }
  const int64_t each = static_cast<int64_t>(buffers.size()) / groups.count;
  for (auto next = buffers.begin(); next != buffers.end(); next += each)
    each_.push_back(side(given_buffers({next, next + each}, {spec, direction, shape}, what), direction));
  operand_.each = {each_.data(), each_.size()};
}

GivenOperand::GivenOperand(const std::array<at::Tensor, 3>& three, const GivenGroups& given, const char* what)
    : operand_(with_side(operand_of(given, what), flat_side(three, given.spec, given.direction, what))) {
  if (!given.groups.ends.data) check_saved(three, {given.spec, given.direction, {given.groups.rows, given.cols}}, what);
}

void GroupedCodes::allocate(Direction direction, const GroupedRole& q) {
  const bool kept = q.kept == direction;
  const size_t first = quire::first_buffer(direction);
  const auto of_all =
      groups_.ends.data
          ? grouped_results<int64_t>(spec_, {groups_.rows, cols_, groups_.count}, direction, true)
          : stacked_results<int64_t>(spec_, {groups_.rows / groups_.count, cols_}, groups_.count, direction, true);
  for (size_t i = 0; i < 3; ++i) {
    const bool result = kept || (i == 2 && q.scale);
    buffers_[first + i] =
        result ? q.results[i] : op::allocate(sizes(of_all[i]), at::device(q.device).dtype(of_all[i].dtype));
  }
  only_[static_cast<size_t>(direction)] = present_side(buffers_[first], buffers_[first + 1], buffers_[first + 2]);
}

FlatBuffers GroupedCodes::side(Direction direction) const {
  const size_t first = quire::first_buffer(direction);
  if (!buffers_[first].defined()) return {};
  if (quire::is_one(groups_)) return {only_[static_cast<size_t>(direction)]};
  return flat_side(std::span(buffers_).subspan(first, 3), spec_, direction, what_);
}

GroupedCodes::GroupedCodes(const quire::Matrix& x, std::span<const quire::Matrix> each, const quire::RowGroups& groups,
                           const GroupedRole& q, const quire::Context& context)
    : spec_(q.spec), groups_(groups), cols_(x.cols), what_(q.what) {
  if (q.rowwise) allocate(Direction::rowwise, q);
  if (q.columnwise) allocate(Direction::columnwise, q);
  const FlatBuffers rowwise = side(Direction::rowwise), columnwise = side(Direction::columnwise);
  quire::quantize({.spec = spec_,
                   .x = x,
                   .rowwise = rowwise.side,
                   .columnwise = columnwise.side,
                   .random = q.random,
                   .scale = q.scale,
                   .amax = {.rowwise = q.rowwise ? q.amax : nullptr, .columnwise = q.columnwise ? q.amax : nullptr},
                   .role = q.role,
                   .groups = groups_,
                   .each = each,
                   .room = {.rowwise = rowwise.room, .columnwise = columnwise.room},
                   .only = q.only,
                   .what = q.what},
                  context);
}

quire::Operand GroupedCodes::operand(Direction direction) const {
  return with_side(operand_of({spec_, direction, groups_, cols_}, what_), side(direction));
}

}  // namespace quire_torch
