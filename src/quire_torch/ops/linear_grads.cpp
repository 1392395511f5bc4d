#include "quire_torch/ops/linear_grads.h"

#include "quire/operations/operations.h"
#include "quire_torch/ops/wgrad.h"

namespace quire_torch {

using quire::Direction;

void LinearDgrad::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const quire::MutableMatrix dx = mutable_matrix(out[0]);
  const int64_t n = op::as<int64_t>(a.out_features);
  const quire::RowGroups groups = quire::RowGroups::equal(1, dx.rows);
  const GivenOperand dy(std::array{a.dy_data, a.dy_scale, a.dy_amax}, {a.recipe->dy, Direction::rowwise, groups, n},
                        "linear_dgrad: dy"),
      w(a.w_buffers, GivenGroups::matrices(a.recipe->w, Direction::columnwise, 1, {n, dx.cols}), "linear_dgrad: w");
  quire::gemm({.a = dy, .b = w, .out = dx, .role = quire::kDgrad}, context);
}

void LinearWgrad::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const int64_t tokens = op::as<int64_t>(a.tokens);
  quire::check(tokens >= 0 && tokens <= most_tokens(a.dy_data, a.x_data), "linear_wgrad: tokens must be the rows of x ",
               "and dy, from 0 to ", most_tokens(a.dy_data, a.x_data), " for these codes; got ", tokens);
  const quire::RowGroups groups = quire::RowGroups::equal(1, tokens);
  const GivenOperand dy(std::array{a.dy_data, a.dy_scale, a.dy_amax},
                        {a.recipe->dy, Direction::columnwise, groups, out[0].size(0)}, "linear_wgrad: dy"),
      x(std::array{a.x_data, a.x_scale, a.x_amax}, {a.recipe->x, Direction::columnwise, groups, out[0].size(1)},
        "linear_wgrad: x");
  quire::gemm({.a = dy, .b = x, .out = mutable_matrix(out[0]), .role = quire::kWgrad}, context);
}

}  // namespace quire_torch
