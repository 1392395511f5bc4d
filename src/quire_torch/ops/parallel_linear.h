// quire::parallel_linear: a linear whose weight is sharded over the ranks of a group. Collectives are operators of
// their own in every graph but an exported one.
#pragma once

#include <utility>

#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/parallel.h"
#include "quire_torch/ops/ring.h"

namespace quire_torch {

/// y = x w^T + bias of a weight that is sharded over the `size` ranks of a group, as `parallel` says (parallel.h).
///   column: w [N / size, K] and bias [N / size] are this rank's; x [T, *, K], or where tokens are sharded
///           [T / size, *, K]; y [T, *, N / size]
///   row:    w [N, K / size] is this rank's, bias [N] everybody's; x [T, *, K / size]; y [T, *, N], or where tokens
///           are sharded [T / size, *, N], is the sum over the ranks, in `dtype`, and then bias
/// Operands have the codes that they have in one process: amaxes above the blocks are reduced over the group, and part,
/// int64 {index of this rank, size, cuts}, says which bits a gradient rounds stochastically with (quantize.h). Where
/// tokens are sharded, codes are gathered, or, if a part ends within a block, values, which are quantized afterwards.
/// input_scale: float32 [1], the same on all ranks: what x is quantized with under a spec with the option `given`.
/// The other arguments and results are those of grouped_linear. Differentiable once in x, w and bias.
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
  using Saved = GroupedLinear::Saved;

  static op::Tensors<3> inference(const Args& a);
  static std::pair<op::Tensors<3>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<11> backward(const Saved& s, const op::Tensors<3>& grads, op::Needs need);
};

/// The results of linear_bwd of a rank. Where w is sharded by columns dx is a sum that is under way instead.
struct ParallelGradients {
  op::Tensors<6> values;
  Sums dx{};
};
ParallelGradients parallel_bwd(const LinearBwd::Args& a, const Parallel& p, const op::OptionalTensor& part);
/// The same of groups of tokens.
ParallelGradients parallel_groups_bwd(LinearBwd::Args a, const Parallel& p, const op::OptionalTensor& part);
/// The same of linear_unquantized_bwd, whose dx is its values.
op::Tensors<3> parallel_unquantized_bwd(LinearUnquantizedBwd::Args a, const Parallel& p);
/// dx of the dy of all ranks as it arrives. dy: of this rank, becomes that of all.
at::Tensor dx_of_arrivals(LinearUnquantizedBwd::Args a, const Parallel& p, at::Tensor& dy);
/// The sizes of dx of this rank where w is sharded by columns. dy [T, *, N / size]: of all tokens.
std::vector<c10::SymInt> sizes_of_dx(const at::Tensor& dy, const Parallel& p, const c10::SymInt& in_features);

}  // namespace quire_torch
