// The operators that users, export and AOTInductor see. quire::grouped_linear: linears of groups of tokens, or of one,
// with operands that are given quantized and with state that backward changes. quire::linear: y = x w^T + bias under a
// recipe; quire::linear_prequantized: the same with operands that are given quantized. These two compute
// quire::grouped_linear of one group. They are quicker to call and shorter to read in a graph.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/linear_bwd.h"

namespace quire_torch {

/// For each group of rows of x [*, K] a linear of its own, y [*, N] in `dtype` (linear_fwd.h); without offsets one
/// group has all rows. Differentiable once in x, w and bias. x_amax and w_amax [E] are those of delayed scaling;
/// without fwd_scale they say nothing. x_buffers: x is given quantized, as six buffers (of groups flat ones), of which
/// backward needs the columnwise ones; it receives the gradient and is not read. w_buffers: six buffers of w for each
/// group, w then gets a gradient and is not read, unless w_fingerprint is given; backward=high_precision then
/// multiplies w itself, else the values of its codes. sr_state: int64 [2]. fwd_scale, bwd_scale, bwd_amax: delayed
/// scaling, float32 [3 E], [2 E] and [2 E], slot after slot. main_grad: E matrices, or one [E, N, K], to which backward
/// adds the gradient of w (or which it overwrites). wgrad_stash: int64 [2] {number, count} on the CPU under which
/// backward keeps what that gradient is computed from. w then gets none, or with placeholder zeros. out, dgrad_out:
/// contiguous memory in `dtype` for the values of y [*, N] and dx [*, K], or [T, N] and [T, K] of the T rows of x,
/// which shares no bytes with another argument and needs no gradient. They are copied there: autograd is given tensors
/// of its own, since a graph would lose the gradient of a result that is the alias of its input, and autograd may add
/// to a gradient in place.
struct GroupedLinear : OpBase {
  static constexpr const char* kName = "grouped_linear";
  struct Args {
    at::Tensor x;
    op::GradientList w, bias;
    op::OptionalTensor offsets;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    OptionalTensors x_buffers{}, w_buffers{};
    std::optional<at::Tensor> w_fingerprint{}, sr_state{}, fwd_scale{}, bwd_scale{}, bwd_amax{}, wgrad_stash{};
    op::Mutable<op::OptionalTensor> out{};
    std::optional<at::Tensor> dgrad_out{};
    op::TensorList main_grad{};
    bool overwrite_main_grad = false, placeholder = false;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::x_buffers>("x_buffers"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::main_grad>("main_grad"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::fwd_scale>("fwd_scale", "None"),
                                               op::field<&Args::bwd_scale>("bwd_scale", "None"),
                                               op::field<&Args::bwd_amax>("bwd_amax", "None"),
                                               op::field<&Args::wgrad_stash>("wgrad_stash", "None"),
                                               op::field<&Args::overwrite_main_grad>("overwrite_main_grad", "False"),
                                               op::field<&Args::placeholder>("placeholder", "False"),
                                               op::field<&Args::out>("out", "None"),
                                               op::field<&Args::dgrad_out>("dgrad_out", "None")};
  };
  static constexpr std::array kResults{"y", "x_amax", "w_amax"};
  static constexpr size_t kDifferentiable = 1;

  /// What backward needs: codes in the direction that it reads, or x and w themselves where it multiplies or quantizes
  /// those (requantized, high_precision).
  struct Saved {
    op::OptionalTensor offsets;
    at::Tensor x_data, x_scale, x_amax;
    at::Tensor bwd_scale;
    op::TensorList w;
    op::OptionalTensorList w_buffers;
    op::State sr_state, bwd_amax, wgrad_stash, dgrad_out;
    op::StateList main_grad;
    c10::SymInt in_features;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    bool stacked_w, stacked_bias, overwrite_main_grad, placeholder;
    static constexpr auto kFields = std::tuple{op::field<&Saved::offsets>("offsets"),
                                               op::field<&Saved::x_data>("x_data"),
                                               op::field<&Saved::x_scale>("x_scale"),
                                               op::field<&Saved::x_amax>("x_amax"),
                                               op::field<&Saved::bwd_scale>("bwd_scale"),
                                               op::field<&Saved::w>("w"),
                                               op::field<&Saved::w_buffers>("w_buffers"),
                                               op::field<&Saved::sr_state>("sr_state"),
                                               op::field<&Saved::bwd_amax>("bwd_amax"),
                                               op::field<&Saved::wgrad_stash>("wgrad_stash"),
                                               op::field<&Saved::dgrad_out>("dgrad_out"),
                                               op::field<&Saved::main_grad>("main_grad"),
                                               op::field<&Saved::in_features>("in_features"),
                                               op::field<&Saved::recipe>("recipe"),
                                               op::field<&Saved::dtype>("dtype"),
                                               op::field<&Saved::stacked_w>("stacked_w"),
                                               op::field<&Saved::stacked_bias>("stacked_bias"),
                                               op::field<&Saved::overwrite_main_grad>("overwrite_main_grad"),
                                               op::field<&Saved::placeholder>("placeholder")};
  };

  static op::Tensors<3> inference(const Args& a);
  static std::pair<op::Tensors<3>, Saved> forward(const Args& a, op::Needs need);
  /// Throws where forward would refuse the arguments.
  static void check(const Args& a, op::Needs need);
  /// The results of linear_fwd, and what is kept of x.
  static std::pair<op::Tensors<7>, DirectionBuffers> product(const Args& a, op::Needs need);
  /// x: what is kept of it. r: the results of linear_fwd.
  static Saved saved(const Args& a, const DirectionBuffers& x, const op::Tensors<7>& r, op::Needs need);
  static op::Tensors<11> backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need);
  /// dx, dw and dbias as linear_bwd gives them; undefined where not needed, or where dw has gone elsewhere.
  static op::Tensors<3> gradients(const Saved& s, const at::Tensor& dy, op::Needs need);
};

/// A saved tensor that may be absent, which is undefined then.
inline op::OptionalTensor given(const at::Tensor& saved) {
  return saved.defined() ? op::OptionalTensor(saved) : std::nullopt;
}

/// What the backward pass of a linear writes besides the gradients that it returns.
/// Each may be absent. Forward checks them, since a refusal in backward would come after others of its writes.
struct Destinations {
  op::OptionalTensor sr_state, bwd_scale, bwd_amax, wgrad_stash;
  const op::TensorList& main_grad;

  /// What backward checks once more when it begins, since it may have been resized.
  static Destinations of(const GroupedLinear::Saved& s) {
    return {given(s.sr_state.tensor), std::nullopt, given(s.bwd_amax.tensor), given(s.wgrad_stash.tensor),
            s.main_grad.tensors};
  }
  /// Throws unless each fits `groups` linears whose weights have these sizes [N, K], and lies where they compute (the
  /// stash: on the host).
  void check(at::Device device, const c10::SymInt& groups, const std::array<c10::SymInt, 2>& weight) const;
};

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

/// Calls that autograd records, for those that do not go through the dispatcher (src/quire_python).
extern template op::Tensors<1> op::detail::record<Linear>(const Linear::Args& a);
extern template op::Tensors<1> op::detail::record<LinearPrequantized>(const LinearPrequantized::Args& a);

/// How many groups of rows there are.
inline c10::SymInt groups_of(const op::OptionalTensor& offsets) {
  return offsets ? offsets->sym_size(0) : c10::SymInt(1);
}

/// What backward multiplies; without a recipe, x and w themselves.
inline quire::Backward mode_of(const OptionalRecipeText& recipe) {
  return *recipe ? (*recipe)->backward : quire::Backward::high_precision;
}

/// Whether backward starts from x itself.
inline bool keeps_x(const OptionalRecipeText& recipe) {
  const quire::Backward mode = mode_of(recipe);
  return mode == quire::Backward::high_precision || mode == quire::Backward::requantized || (*recipe)->weight_only;
}

/// Copies the rows of groups of a result to memory of the caller's; its other rows stay as they are. A condition on the
/// device selects them, since the host reads no offset.
void copy_result(const at::Tensor& memory, const at::Tensor& result, const op::OptionalTensor& offsets);

}  // namespace quire_torch
