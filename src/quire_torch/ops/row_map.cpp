#include "quire_torch/ops/row_map.h"

#include "quire/operations/operations.h"

namespace quire_torch {

void ExpertRows::run(const Args& a, op::Tensors<2>& out, const quire::Context& context) {
  const at::Tensor ids = a.topk_ids.contiguous();
  quire::expert_rows({.ids = ids.const_data_ptr<int32_t>(),
                      .count = ids.numel(),
                      .row_map = out[0].mutable_data_ptr<int32_t>(),
                      .offsets = a.num_experts > 0 ? out[1].mutable_data_ptr<int32_t>() : nullptr,
                      .num_experts = a.num_experts},
                     context);
}

void ChunkRows::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const at::Tensor sizes = a.sizes.contiguous(), order = a.order ? a.order->contiguous() : at::Tensor();
  quire::check(!order.defined() || order.numel() == sizes.numel(), "chunk_rows: order must have one number per chunk, ",
               sizes.numel(), ", got ", order.defined() ? order.numel() : 0);
  quire::chunk_rows({.sizes = integers(sizes),
                     .order = order.defined() ? integers(order) : quire::Integers{},
                     .align = a.align,
                     .row_map = out[0].mutable_data_ptr<int32_t>(),
                     .rows = out[0].numel()},
                    context);
}

}  // namespace quire_torch
