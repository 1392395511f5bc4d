#include "quire_torch/ops/row_map.h"

#include "quire/moe/row_map.h"

namespace quire_torch {
namespace {

template <class T>
std::span<const T> values(const at::Tensor& t) {
  return {t.const_data_ptr<T>(), static_cast<size_t>(t.numel())};
}
std::span<int32_t> to_be_written(at::Tensor& t) {
  return {t.mutable_data_ptr<int32_t>(), static_cast<size_t>(t.numel())};
}

}  // namespace

void ExpertRows::cpu(const Args& a, op::Tensors<2>& out) {
  const at::Tensor ids = a.topk_ids.contiguous();
  quire::expert_rows(
      {.ids = values<int32_t>(ids), .row_map = out[0].mutable_data_ptr<int32_t>(), .offsets = to_be_written(out[1])});
}

void ChunkRows::cpu(const Args& a, op::Tensors<1>& out) {
  const at::Tensor sizes = a.sizes.to(at::kLong).contiguous();
  const at::Tensor order = a.order ? a.order->to(at::kLong).contiguous() : at::Tensor();
  quire::check(!order.defined() || order.numel() == sizes.numel(), "chunk_rows: order must have one number per chunk, ",
               sizes.numel(), ", got ", order.defined() ? order.numel() : 0);
  quire::chunk_rows({.sizes = values<int64_t>(sizes),
                     .order = order.defined() ? values<int64_t>(order) : std::span<const int64_t>(),
                     .align = a.align,
                     .row_map = to_be_written(out[0])});
}

}  // namespace quire_torch
