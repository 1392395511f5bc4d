// quire::parallel_linear: a linear whose weight is sharded over the ranks of a group. Collectives are operators of
// their own in every graph but an exported one.
#pragma once

#include <utility>

#include "quire_torch/ops/parallel_bwd.h"

namespace quire_torch {

/// y = x w^T + bias of a weight that is sharded over the ranks of a group, as `parallel` says (parallel.h). x, w, bias
/// and y are what this rank has of them, in one of four cases (the table in parallel_linear.cpp). Operands have the
/// codes that they have in one process: amaxes above the blocks are reduced over the group, and part, int64 {index of
/// this rank, size, cuts}, says which bits a gradient rounds stochastically with (quantize.h). Where tokens are
/// sharded, codes are gathered, or, if a part ends within a block, values, which are quantized afterwards. input_scale:
/// float32 [1], the same on all ranks: what x is quantized with under a spec with the option `given`. The other
/// arguments and results are those of grouped_linear. Differentiable once in x, w and bias.
struct ParallelLinear : OpBase {
  static constexpr const char* kName = "parallel_linear";
  struct Args {
    at::Tensor x, w;
    op::OptionalTensor bias;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    OptionalParallelText parallel;
    OptionalTensors w_buffers{};
    op::TensorList main_grad{};
    std::optional<at::Tensor> w_fingerprint{}, sr_state{}, part{}, input_scale{}, fwd_scale{}, bwd_scale{}, bwd_amax{},
        wgrad_stash{};
    bool overwrite_main_grad = false, placeholder = false;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::parallel>("parallel"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::main_grad>("main_grad"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::part>("part", "None"),
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
  /// Decomposed where nothing needs a gradient, so that a graph shows the collectives.
  static constexpr bool kComposite = true;
  using Saved = ParallelSaved;

  static op::Tensors<3> inference(const Args& a);
  static std::pair<op::Tensors<3>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<11> backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need);
};

}  // namespace quire_torch
