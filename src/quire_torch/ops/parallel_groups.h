// quire::parallel_grouped_linear: linears of groups of tokens whose weights are sharded over the ranks of a group,
// such as the experts of a mixture. Collectives are operators of their own in every graph but an exported one.
#pragma once

#include <utility>

#include "quire_torch/ops/parallel_bwd.h"

namespace quire_torch {

/// grouped_linear of weights that are sharded over the `size` ranks of a group, as `parallel` says (parallel.h);
/// tokens are the same on all ranks.
///   column: each w [N / size, K] and bias [N / size] is this rank's, x [T, *, K] is whole; y [T, *, N / size]
///   row:    each w [N, K / size] is this rank's, each bias [N] everybody's; x [T, *, K / size]; y [T, *, N] is the
///           sum over the ranks, of which the first one adds bias to its part
/// Operands have the codes that they have in one process, as in parallel_linear; input_scale: float32 [E]. The other
/// arguments and results are those of grouped_linear. Differentiable once in x, w and bias.
struct ParallelGroupedLinear : OpBase {
  static constexpr const char* kName = "parallel_grouped_linear";
  struct Args {
    at::Tensor x;
    op::GradientList w, bias;
    at::Tensor offsets, part;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    OptionalParallelText parallel;
    OptionalTensors w_buffers{};
    op::TensorList main_grad{};
    std::optional<at::Tensor> w_fingerprint{}, sr_state{}, input_scale{}, fwd_scale{}, bwd_scale{}, bwd_amax{},
        wgrad_stash{};
    bool overwrite_main_grad = false, placeholder = false;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::part>("part"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::parallel>("parallel"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::main_grad>("main_grad"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::input_scale>("input_scale", "None"),
                                               op::field<&Args::fwd_scale>("fwd_scale", "None"),
                                               op::field<&Args::bwd_scale>("bwd_scale", "None"),
                                               op::field<&Args::bwd_amax>("bwd_amax", "None"),
                                               op::field<&Args::wgrad_stash>("wgrad_stash", "None"),
                                               op::field<&Args::overwrite_main_grad>("overwrite_main_grad", "False"),
                                               op::field<&Args::placeholder>("placeholder", "False")};
  };
  static constexpr std::array kResults{"y", "x_amax", "w_amax"};
  static constexpr size_t kDifferentiable = 1;
  static constexpr bool kComposite = true;
  using Saved = ParallelSaved;

  static op::Tensors<3> inference(const Args& a);
  static std::pair<op::Tensors<3>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<12> backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need);
};

}  // namespace quire_torch
