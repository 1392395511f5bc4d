#include "quire_torch/ops/grouped_quantize.h"

namespace quire_torch {

void GroupedQuantize::run(const Args& a, op::Tensors<3>& out, const quire::Context& context) {
  const MatrixView x(a.x, "grouped_quantize: x");
  const Groups groups(a.offsets, x.matrix().rows, "grouped_quantize");
  quantize_groups(rows_of(x.matrix(), groups), groups, x.matrix().cols,
                  {.what = "grouped_quantize: x",
                   .role = "",
                   .spec = *a.spec,
                   .rowwise = !a.columnwise,
                   .columnwise = a.columnwise,
                   .scale = group_scales(a.scale, 1, static_cast<int64_t>(groups.size()), 0, "grouped_quantize: scale"),
                   .results = out,
                   .kept = a.direction()},
                  context);
}

void GroupedDequantize::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const quire::MutableMatrix m = mutable_matrix(out[0]);
  const Groups groups(a.offsets, m.rows, "grouped_dequantize");
  const GroupedLayout layout{*a.spec, groups, m.cols, quire::Direction::rowwise};
  const auto sides = grouped_sides(std::array{a.data, a.scale, a.amax}, layout, "grouped_dequantize: data");
  zero_beyond(out[0], groups);
  for (size_t e = 0; e < groups.size(); ++e) decode_group({sides, layout, e}, rows_of(m, groups, e), context);
}

}  // namespace quire_torch
