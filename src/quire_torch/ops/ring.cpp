#include "quire_torch/ops/ring.h"

#include <ATen/ops/cat.h>

#include "quire_torch/ops/agree.h"
#include "quire_torch/ops/reduce.h"

namespace quire_torch {

using quire::Direction;

Arrivals::Arrivals(const at::Tensor& own, const Group& group) : own_{own, {}, {}}, coded_(false), group_(group) {
  for (int64_t i = 0; i < group.size; ++i) started_.push_back(broadcast(own, i, group));
}

Arrivals::Arrivals(const DirectionBuffers& own, const quire::QuantSpec& spec, const Group& group, bool given_scale)
    : own_(own),
      coded_(true),
      own_scales_(has_own_scales(spec, given_scale)),
      axes_(token_axes(spec, Direction::rowwise)),
      group_(group) {
  op::TensorList bytes;
  for (size_t i = 0; i < own.size(); ++i)
    if (travels(i)) bytes.push_back(own[i].flatten().view(at::kByte));
  const at::Tensor packed = bytes.size() == 1 ? bytes[0] : at::cat(bytes);
  agree_before(packed);
  for (int64_t i = 0; i < group.size; ++i) started_.push_back(broadcast(packed, i, group));
}

DirectionBuffers Arrivals::take(int64_t i) const {
  const at::Tensor there = wait(started_[static_cast<size_t>(i)], "broadcast", group_);
  if (!coded_) return {there, there.new_empty({0}), there.new_empty({0})};
  DirectionBuffers taken = own_;
  c10::SymInt begin = 0;
  for (size_t k = 0; k < taken.size(); ++k) {
    if (!travels(k)) continue;
    const auto size = static_cast<int64_t>(c10::elementSize(own_[k].scalar_type()));
    // A product of sizes, because Dynamo cannot trace aten::sym_numel, which compiled autograd would call.
    const c10::SymInt length = c10::multiply_integers(own_[k].sym_sizes()) * size;
    at::Tensor bytes = there.narrow_symint(0, begin, length);
    if (size > 1) bytes = bytes.clone();  // which may not lie as the dtype wants them to
    taken[k] = bytes.view(own_[k].scalar_type()).view_symint(own_[k].sym_sizes());
    begin = begin + length;
  }
  return taken;
}

Cut cut(int64_t i, const c10::SymInt& rows, int64_t block, const Group& group) {
  const auto bound = [&](int64_t k) { return k == group.size ? rows : rows * k / (group.size * block) * block; };
  const c10::SymInt begin = bound(i);
  return {begin, bound(i + 1) - begin};
}

namespace {

/// Each rank's rows of a piece, of a matrix or of what lies in memory as one.
at::Tensor taken(const at::Tensor& tensor, TokenAxis along, const Cut& piece, const Group& group) {
  const at::Tensor t = tensor.dim() > 2 ? tensor.flatten(0, -2) : tensor;
  const auto axis = static_cast<size_t>(along.axis);
  auto split = t.sym_sizes().vec(), sizes = split;
  split[axis] = split[axis] / group.size;
  split.insert(split.begin() + along.axis, group.size);
  const c10::SymInt length = piece.length / along.rows;
  sizes[axis] = length * group.size;
  return t.view_symint(split)
      .narrow_symint(along.axis + 1, piece.begin / along.rows, length)
      .reshape_symint(sizes)
      .contiguous();
}

}  // namespace

at::Tensor rows_of(const at::Tensor& t, const Cut& piece, const Group& group) {
  return taken(t.contiguous(), {.axis = 0, .rows = 1}, piece, group);
}

DirectionBuffers rows_of(const DirectionBuffers& codes, const quire::QuantSpec& spec, const Cut& piece,
                         const Group& group) {
  const auto axes = token_axes(spec, Direction::rowwise);
  DirectionBuffers found = codes;
  for (size_t i = 0; i < found.size(); ++i)
    if (axes[i].axis >= 0) found[i] = taken(codes[i], axes[i], piece, group);
  return found;
}

void Sums::start(const at::Tensor& partial, const Parallel& p, const Cut& piece) {
  started.push_back(start_sum(partial, p));
  rows.push_back(piece.length);
}

at::Tensor Sums::wait(const Parallel& p, const std::vector<c10::SymInt>& sizes, at::ScalarType dtype,
                      const op::OptionalTensor& bias) const {
  if (rows.empty()) return wait_for_sum(started[0], p, sizes, dtype, bias);
  op::TensorList pieces;
  for (size_t i = 0; i < rows.size(); ++i)
    pieces.push_back(wait_for_sum(started[i], p, {rows[i], sizes.back()}, dtype, bias));
  return at::cat(pieces).view_symint(sizes);
}

}  // namespace quire_torch
