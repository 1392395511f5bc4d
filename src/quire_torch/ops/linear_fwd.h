// y = x w^T + bias, of all rows of x or of groups of them, each with a w and a bias of its own. The inner forward
// operator: what training graphs contain.
#pragma once

#include "quire_torch/ops/operands.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

using OptionalTensors = op::OptionalTensorList;

/// Which operands linear_fwd keeps for backward (bits of `save`).
inline constexpr int64_t kSaveX = 1, kSaveW = 2;

/// Columnwise, but for a backward pass that decodes what forward multiplied.
inline quire::Direction saved_direction(const quire::LinearSpec& recipe) {
  return recipe.backward == quire::Backward::dequantized ? quire::Direction::rowwise : quire::Direction::columnwise;
}

/// Throws unless x [*, K] and w [N, K] agree: linear_fwd does not see a w that is given quantized.
void check_agreement(const at::Tensor& x, const at::Tensor& w);

/// x [*, K] and w [..., N, K]. Raises RuntimeError.
void check_k(const at::Tensor& x, const at::Tensor& w);

/// Throws unless a list has a tensor of `each` sizes for each group, or one for all of them, on `device`.
template <class Int>
void check_list(const op::TensorList& list, int64_t groups, c10::ArrayRef<Int> each, const char* what,
                at::Device device);

/// x [*, K], whose rows (T in all) belong to E groups as offsets [E] says (groups.h), or are one group without them;
/// w: E matrices [N, K], or one [E, N, K]; bias: none, E vectors [N], or one [E, N]. For each group x and w, both
/// rowwise, give y [*, N] in `dtype` (numerics.md 6.1, 0.19); rows beyond the last group are zero. N = out_features.
/// Operands asked for by `save` are returned quantized in the direction that backward reads (saved_direction), in flat
/// buffers (quire/spec/groups.h).
/// recipe: "" multiplies x and w as they are, in `dtype`. x_buffers: x is given quantized, as its six buffers, which of
/// groups are flat, and tells only shape and dtype. w_buffers: w is given quantized, as six buffers for each group or
/// flat ones of all, and is not read unless w_fingerprint is given: int64 [E], of each w when its buffers were made;
/// throws where one has changed since. fwd_scale: delayed scaling, float32 [3 E], of x in each group, w in each, and E
/// that are not used; x_amax and w_amax [E] are then returned, w_amax unless w is given.
struct LinearFwd : OpBase {
  static constexpr const char* kName = "linear_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire.Linear";
  struct Args {
    at::Tensor x;
    op::TensorList w, bias;
    op::OptionalTensor offsets;
    c10::SymInt out_features;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    int64_t save;
    OptionalTensors x_buffers{}, w_buffers{};
    std::optional<at::Tensor> w_fingerprint{}, fwd_scale{};
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::out_features>("out_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::save>("save"),
                                               op::field<&Args::x_buffers>("x_buffers"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None"),
                                               op::field<&Args::fwd_scale>("fwd_scale", "None")};
  };
  static constexpr std::array kResults{"y", "x_data", "x_scale", "x_amax", "w_data", "w_scale", "w_amax"};

  template <class Int>
  static std::array<op::Result<Int>, 7> results(const Args& a);
  static void run(const Args& a, op::Tensors<7>& out, const quire::Context& context);
};

}  // namespace quire_torch
