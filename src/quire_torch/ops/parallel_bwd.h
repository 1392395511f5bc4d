// The backward pass of layers whose weights are sharded over the ranks of a group: the steps of grouped_linear_bwd.h
// with exchanges between them. parallel_linear.cpp has the table of what is gathered, summed and reduced.
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
