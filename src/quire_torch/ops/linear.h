// quire::linear, the operator that users, export and AOTInductor see: y = x w^T + bias under a recipe.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/linear_bwd.h"

namespace quire_torch {

/// x [*, K], w [N, K], bias [N] or none -> y [*, N] in `dtype`. Differentiable once in x, w and bias.
struct Linear : OpBase {
  static constexpr const char* kName = "linear";
  struct Args {
    at::Tensor x, w;
    std::optional<at::Tensor> bias;
    RecipeText recipe;
    at::ScalarType dtype;
    std::optional<at::Tensor> sr_state;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::x>("x"),         op::field<&Args::w>("w"),
                   op::field<&Args::bias>("bias"),   op::field<&Args::recipe>("recipe"),
                   op::field<&Args::dtype>("dtype"), op::field<&Args::sr_state>("sr_state", "None")};
  };
  static constexpr std::array kResults{"y"};

  /// What backward needs. Operands are saved quantized and columnwise; sr_state is the module's live counter.
  struct Saved {
    at::Tensor x_data, x_scale, x_amax;
    at::Tensor w_data, w_scale, w_amax;
    op::State sr_state;
    c10::SymInt in_features;
    RecipeText recipe;
    at::ScalarType dtype;
    static constexpr auto kFields =
        std::tuple{op::field<&Saved::x_data>("x_data"),     op::field<&Saved::x_scale>("x_scale"),
                   op::field<&Saved::x_amax>("x_amax"),     op::field<&Saved::w_data>("w_data"),
                   op::field<&Saved::w_scale>("w_scale"),   op::field<&Saved::w_amax>("w_amax"),
                   op::field<&Saved::sr_state>("sr_state"), op::field<&Saved::in_features>("in_features"),
                   op::field<&Saved::recipe>("recipe"),     op::field<&Saved::dtype>("dtype")};
  };

  static op::Tensors<1> inference(const Args& a) { return {op::call<LinearFwd>(inner(a, 0))[0]}; }
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<4> backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need);

 private:
  static LinearFwd::Args inner(const Args& a, int64_t save) {
    return {.x = a.x, .w = a.w, .bias = a.bias, .recipe = a.recipe, .dtype = a.dtype, .save = save};
  }
};

}  // namespace quire_torch
