// quire::linear, the operator that users, export and AOTInductor see: y = x w^T + bias under a recipe. And
// quire::linear_given, the same with operands that are given quantized and with state that backward changes.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/linear_bwd.h"

namespace quire_torch {

/// x [*, K], w [N, K], bias [N] or none -> y [*, N] in `dtype`. Differentiable once in x, w and bias.
/// x_buffers, w_buffers: the operand is given already quantized, as six buffers (columnwise ones are needed for the
/// gradient of the other operand); its tensor then tells shape and dtype and receives the gradient, and is not read.
/// sr_state: int64 [2] {seed, counter}, for gradients that round stochastically.
/// bwd_scale, bwd_amax: float32 [2], state of delayed scaling for dy and dx. The scale is copied now and used in
/// backward, which puts the amaxes into bwd_amax.
/// main_grad: [N, K], to which backward adds the gradient of w (or which it overwrites); w then gets none.
/// wgrad_stash: int64 [2] {number, count} on the CPU; backward keeps the operands of the gradient of w under that
/// number, and w gets none.
/// placeholder: where w gets no gradient by one of these, it gets zeros, for hooks that wait for one.
/// w_fingerprint: of w when w_buffers were made; throws where w has changed since.
struct LinearGiven : OpBase {
  static constexpr const char* kName = "linear_given";
  struct Args {
    at::Tensor x, w;
    std::optional<at::Tensor> bias;
    RecipeText recipe;
    at::ScalarType dtype;
    OptionalTensors x_buffers{}, w_buffers{};
    std::optional<at::Tensor> sr_state{}, bwd_scale{}, bwd_amax{}, main_grad{}, wgrad_stash{}, w_fingerprint{};
    bool overwrite_main_grad = false, placeholder = false;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::x_buffers>("x_buffers"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::bwd_scale>("bwd_scale", "None"),
                                               op::field<&Args::bwd_amax>("bwd_amax", "None"),
                                               op::field<&Args::main_grad>("main_grad", "None"),
                                               op::field<&Args::wgrad_stash>("wgrad_stash", "None"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None"),
                                               op::field<&Args::overwrite_main_grad>("overwrite_main_grad", "False"),
                                               op::field<&Args::placeholder>("placeholder", "False")};
  };
  static constexpr std::array kResults{"y"};

  /// What backward needs. Operands are saved columnwise; under other values of recipe.backward, x_data is x itself
  /// (requantized, high_precision) or the buffers are rowwise ones (dequantized), and so for w.
  struct Saved {
    at::Tensor x_data, x_scale, x_amax;
    at::Tensor w_data, w_scale, w_amax;
    at::Tensor bwd_scale;
    op::State sr_state, bwd_amax, main_grad, wgrad_stash;
    c10::SymInt in_features;
    RecipeText recipe;
    at::ScalarType dtype;
    bool overwrite_main_grad, placeholder;
    static constexpr auto kFields = std::tuple{op::field<&Saved::x_data>("x_data"),
                                               op::field<&Saved::x_scale>("x_scale"),
                                               op::field<&Saved::x_amax>("x_amax"),
                                               op::field<&Saved::w_data>("w_data"),
                                               op::field<&Saved::w_scale>("w_scale"),
                                               op::field<&Saved::w_amax>("w_amax"),
                                               op::field<&Saved::bwd_scale>("bwd_scale"),
                                               op::field<&Saved::sr_state>("sr_state"),
                                               op::field<&Saved::bwd_amax>("bwd_amax"),
                                               op::field<&Saved::main_grad>("main_grad"),
                                               op::field<&Saved::wgrad_stash>("wgrad_stash"),
                                               op::field<&Saved::in_features>("in_features"),
                                               op::field<&Saved::recipe>("recipe"),
                                               op::field<&Saved::dtype>("dtype"),
                                               op::field<&Saved::overwrite_main_grad>("overwrite_main_grad"),
                                               op::field<&Saved::placeholder>("placeholder")};
  };

  static op::Tensors<1> inference(const Args& a);
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<9> backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need);
};

/// linear_given with nothing given. An operator of its own, because it is what nearly every layer calls: short to call,
/// and without lists of tensors, which vmap does not take.
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
    LinearGiven::Args given() const {
      return {.x = x, .w = w, .bias = bias, .recipe = recipe, .dtype = dtype, .sr_state = sr_state};
    }
  };
  static constexpr std::array kResults{"y"};
  using Saved = LinearGiven::Saved;

  static op::Tensors<1> inference(const Args& a) { return LinearGiven::inference(a.given()); }
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs need) {
    return LinearGiven::forward(a.given(), need);
  }
  static op::Tensors<4> backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need) {
    auto g = LinearGiven::backward(s, dy, need);
    return {std::move(g[0]), std::move(g[1]), std::move(g[2]), {}};
  }
};

}  // namespace quire_torch
