// quire::linear, the operator that users, export and AOTInductor see: y = x w^T + bias under a recipe. And
// quire::linear_prequantized, the same of operands that are given quantized. Both compute quire::grouped_linear of one
// group; they are quicker to call and shorter to read in a graph.
#pragma once

#include <utility>

#include "quire_torch/ops/grouped_linear.h"

namespace quire_torch {

/// x [*, K], w [N, K], bias [N] or none -> y [*, N] in `dtype`. Differentiable once in x, w and bias. Without lists of
/// tensors, which vmap does not take.
/// sr_state: int64 [2] {seed, counter}, for gradients that round stochastically.
struct Linear : OpBase {
  static constexpr const char* kName = "linear";
  struct Args {
    at::Tensor x, w;
    op::OptionalTensor bias;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    op::OptionalTensor sr_state;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::x>("x"),         op::field<&Args::w>("w"),
                   op::field<&Args::bias>("bias"),   op::field<&Args::recipe>("recipe"),
                   op::field<&Args::dtype>("dtype"), op::field<&Args::sr_state>("sr_state", "None")};
  };
  static constexpr std::array kResults{"y"};
  using Saved = GroupedLinear::Saved;

  static op::Tensors<1> inference(const Args& a);
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<4> backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need);
};

/// x_buffers, w_buffers: the operand is given already quantized, as six buffers (columnwise ones are needed for the
/// gradient of the other operand); its tensor then tells shape and dtype and receives the gradient, and is not read.
/// w_fingerprint: of w when w_buffers were made; throws where w has changed since.
struct LinearPrequantized : OpBase {
  static constexpr const char* kName = "linear_prequantized";
  struct Args {
    at::Tensor x, w;
    op::OptionalTensor bias;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    OptionalTensors x_buffers{}, w_buffers{};
    op::OptionalTensor sr_state{}, w_fingerprint{};
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::x_buffers>("x_buffers"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None")};
  };
  static constexpr std::array kResults{"y"};
  using Saved = GroupedLinear::Saved;

  static op::Tensors<1> inference(const Args& a);
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<5> backward(const Saved& s, const op::Tensors<1>& dy, op::Needs need);
};

}  // namespace quire_torch
