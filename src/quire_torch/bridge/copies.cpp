#include "quire_torch/bridge/copies.h"

#include <ATen/ops/empty.h>

#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/tensor.h"
#include "quire_torch/op/device.h"

namespace quire_torch {
namespace {

at::Tensor copied(const at::Tensor& t, at::Device to) {
  return t.to(at::TensorOptions().device(to), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

std::array<at::Tensor, 3> copy_side(const quire::QuantizeProblem& p, quire::Direction direction,
                                    const quire::Context& context, at::Device to) {
  const quire::Side& side = direction == quire::Direction::rowwise ? p.rowwise : p.columnwise;
  const auto stored = results<int64_t>(p.spec, {p.x.rows, p.x.cols}, direction, side.data != nullptr);
  const std::array<void*, 3> memory{side.data, side.scale, side.amax};
  std::array<at::Tensor, 3> copies;
  for (size_t i = 0; i < stored.size(); ++i) {
    const bool there = memory[i] && c10::multiply_integers(sizes(stored[i])) > 0;
    copies[i] = there ? copied(tensor_over(memory[i], sizes(stored[i]), stored[i].dtype, device_of(context)), to)
                      : at::empty(sizes(stored[i]), at::device(to).dtype(stored[i].dtype));
  }
  return copies;
}

HostCopy::HostCopy(const quire::QuantizeProblem& p, const quire::Context& context) : problem_(p) {
  const at::Device from = device_of(context);
  const at::Tensor& x = holders_.emplace_back(copied(tensor_over(p.x, from), op::kHost));
  problem_.x.data = x.const_data_ptr();
  problem_.x.row_stride = p.x.cols;
  for (const auto direction : {quire::Direction::rowwise, quire::Direction::columnwise}) {
    quire::Side& side = direction == quire::Direction::rowwise ? problem_.rowwise : problem_.columnwise;
    if (!side.data) continue;
    const auto copies = copy_side(p, direction, context, op::kHost);
    side = present_side(copies[0], copies[1], copies[2]);
    holders_.insert(holders_.end(), copies.begin(), copies.end());
  }
  problem_.random = {};
  problem_.scale = copy(p.scale, 1, from);
  problem_.amax = {.rowwise = copy(p.amax.rowwise, quire::amax_count(p.spec, p.x.rows), from),
                   .columnwise = copy(p.amax.columnwise, quire::amax_count(p.spec, p.x.cols), from)};
}

const float* HostCopy::copy(const float* values, int64_t count, at::Device from) {
  if (!values || count == 0) return nullptr;
  holders_.push_back(copied(tensor_over(values, {count}, at::kFloat, from), op::kHost));
  return holders_.back().const_data_ptr<float>();
}

}  // namespace quire_torch
