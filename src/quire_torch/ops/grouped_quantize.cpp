#include "quire_torch/ops/grouped_quantize.h"

#include "quire/operations/operations.h"
#include "quire_torch/ops/operands.h"

namespace quire_torch {

namespace {

/// Amaxes that a caller gave for one direction of groups of x; null if there are none.
const float* given_amax(const GroupedQuantize::Args& a, const quire::GroupSizes<int64_t>& sizes) {
  if (!a.amax) return nullptr;
  const int64_t count = quire::grouped_amax_count(*a.spec, sizes, a.direction());
  const bool has_amax = quire::amax_count<int64_t>(*a.spec, 1) > 0;
  quire::check(a.amax->scalar_type() == at::kFloat && a.amax->numel() == count && a.amax->is_contiguous() && has_amax,
               "grouped_quantize: given_amax of ", a.spec->to_string(), " must be what quire::grouped_amax returns, ",
               "contiguous float32 [", count, "], got ", a.amax->scalar_type(), " ", a.amax->sizes());
  return a.amax->const_data_ptr<float>();
}

}  // namespace

void GroupedAmax::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView x(a.x, "grouped_amax: x");
  const GroupsView groups(a.offsets, x.matrix().rows, "grouped_amax");
  auto* const amax = out[0].mutable_data_ptr<float>();
  quire::amax({.spec = *a.spec,
               .x = x.matrix(),
               .rowwise = a.columnwise ? nullptr : amax,
               .columnwise = a.columnwise ? amax : nullptr,
               .groups = groups},
              context);
}

void GroupedQuantize::run(const Args& a, op::Tensors<3>& out, const quire::Context& context) {
  const MatrixView x(a.x, "grouped_quantize: x");
  const GroupsView groups(a.offsets, x.matrix().rows, "grouped_quantize");
  GroupedCodes(x.matrix(), {}, groups,
               {.what = "grouped_quantize: x",
                .role = "",
                .device = a.x.device(),
                .spec = *a.spec,
                .rowwise = !a.columnwise,
                .columnwise = a.columnwise,
                .scale = group_scales(a.scale, 1, groups.count(), 0, "grouped_quantize: scale"),
                .amax = given_amax(a, {x.matrix().rows, x.matrix().cols, groups.count()}),
                .results = out,
                .kept = a.direction()},
               context);
}

void GroupedDequantize::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const quire::MutableMatrix m = mutable_matrix(out[0]);
  const GroupsView groups(a.offsets, m.rows, "grouped_dequantize");
  const auto rowwise = quire::Direction::rowwise;
  constexpr const char* kData = "grouped_dequantize: data";
  const std::array three{a.data, a.scale, a.amax};
  const auto [side, room] = flat_side(three, *a.spec, rowwise, kData);
  if (quire::is_one(groups)) check_saved(three, {*a.spec, rowwise, {m.rows, m.cols}}, kData);
  quire::dequantize({.spec = *a.spec,
                     .direction = rowwise,
                     .rows = m.rows,
                     .cols = m.cols,
                     .data = side.data,
                     .scale = side.scale,
                     .amax = side.amax,
                     .out = m,
                     .groups = groups,
                     .room = room,
                     .what = kData},
                    context);
}

}  // namespace quire_torch
