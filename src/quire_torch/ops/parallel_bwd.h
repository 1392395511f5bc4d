// What the two operators of layers whose weights are sharded over the ranks of a group share. Their backward pass: the
// steps of grouped_linear_bwd.h with exchanges between them. parallel_linear.cpp has the table of what is gathered,
// summed and reduced.
#pragma once

#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/parallel.h"
#include "quire_torch/ops/ring.h"

namespace quire_torch {

/// What backward needs of what this rank has. part: its place, as parallel_linear takes it. layer: its name for errors,
/// where it is known. x_itself: the kept x_data is x, since codes of this rank's tokens would not be those of the
/// whole, and x_scale its static scale.
struct ParallelSaved : GroupedLinear::Saved {
  using Base = GroupedLinear::Saved;
  op::OptionalTensor part;
  OptionalParallelText parallel;
  std::string layer;
  bool x_itself = false;
  static constexpr auto kFields =
      std::tuple{op::field<&ParallelSaved::part>("part"), op::field<&ParallelSaved::parallel>("parallel"),
                 op::field<&ParallelSaved::layer>("layer"), op::field<&ParallelSaved::x_itself>("x_itself")};
};

/// The arguments of grouped_linear that an operator of sharded weights has too, as the caller gave them: all but w,
/// bias and offsets.
template <class Call>
GroupedLinear::Args as_given(const Call& call) {
  return {.x = call.x,
          .w = {},
          .bias = {},
          .offsets = {},
          .recipe = call.recipe,
          .dtype = call.dtype,
          .w_buffers = call.w_buffers,
          .w_fingerprint = call.w_fingerprint,
          .sr_state = call.sr_state,
          .fwd_scale = call.fwd_scale,
          .bwd_scale = call.bwd_scale,
          .bwd_amax = call.bwd_amax,
          .wgrad_stash = call.wgrad_stash,
          .main_grad = call.main_grad,
          .overwrite_main_grad = call.overwrite_main_grad,
          .placeholder = call.placeholder};
}

/// GroupedLinear::gradients of such a layer.
op::Tensors<3> parallel_gradients(const ParallelSaved& s, const at::Tensor& dy, op::Needs need);

/// What linear_bwd computes, on a rank. dx: where w is sharded by outputs the sum that is under way, and no value.
/// tokens: rows that dw sums over.
struct ParallelGradients {
  op::Tensors<6> values;
  Sums dx{};
  c10::SymInt tokens;
};
ParallelGradients parallel_linear_bwd(const LinearBwd::Args& args, const Parallel& sharding,
                                      const op::OptionalTensor& part);
/// The same of groups of tokens.
ParallelGradients parallel_groups_bwd(LinearBwd::Args args, const Parallel& sharding, const op::OptionalTensor& part);

/// What linear_unquantized_bwd computes, on a rank, of the dy of all tokens.
op::Tensors<3> parallel_unquantized_bwd(LinearUnquantizedBwd::Args args, const Parallel& sharding);
/// dx of the dy of all ranks as it arrives. dy: of this rank, becomes that of all.
at::Tensor dx_of_arrivals(LinearUnquantizedBwd::Args args, const Parallel& sharding, at::Tensor& dy);
/// The sizes of dx of this rank where w is sharded by outputs. dy [T, *, N / size]: of all tokens.
std::vector<c10::SymInt> sizes_of_dx(const at::Tensor& dy, const Parallel& sharding, const c10::SymInt& in_features);

}  // namespace quire_torch
