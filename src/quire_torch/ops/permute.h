// Rows to expert order and back (moe-reference.md 2): row maps, which say where rows go when tokens are grouped by
// expert and when groups move, and quire::permute and quire::unpermute, which follow them. These two are adjoint: the
// gradient of one is the other.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// Throws unless `t` is dense int32; `what` and `argument` together are "op: argument".
void check_ids(const at::Tensor& t, const char* what, const char* argument = "");

/// topk_ids int32 [T, k], numbers of experts or -1 for none -> row_map int32 [T, k]: the row of each place when places
/// are sorted by expert, stably, or -1; offsets int32 [num_experts]: the row where each expert's rows end. num_experts
/// 0: not known; offsets is absent.
struct ExpertRows : OpBase {
  static constexpr const char* kName = "expert_rows";
  static constexpr const char* kNotDifferentiable = "has no gradient; its results are integers";
  struct Args {
    at::Tensor topk_ids;
    int64_t num_experts;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::topk_ids>("topk_ids"), op::field<&Args::num_experts>("num_experts")};
  };
  static constexpr std::array kResults{"row_map", "offsets"};

  static op::Tensors<2> inference(const Args& a);
  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a);
  static void run(const Args& a, op::Tensors<2>& out, const quire::Context& context);
};

/// sizes [G] int32 or int64 of chunks of rows, order [G] likewise or none -> row_map int32 [rows, 1]: where each row
/// goes when the chunks stand in that order, each beginning at a multiple of align. Rows after the last chunk stay
/// behind it.
struct ChunkRows : OpBase {
  static constexpr const char* kName = "chunk_rows";
  static constexpr const char* kNotDifferentiable = "has no gradient; its result is an integer";
  struct Args {
    at::Tensor sizes;
    op::OptionalTensor order;
    int64_t align;
    c10::SymInt rows;
    static constexpr auto kFields = std::tuple{op::field<&Args::sizes>("sizes"), op::field<&Args::order>("order"),
                                               op::field<&Args::align>("align"), op::field<&Args::rows>("rows")};
  };
  static constexpr std::array kResults{"row_map"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a);
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// x [T, K] (f32, f16, bf16, or without weights uint8), row_map int32 [T, S], weights float32 [T, S] or none ->
/// [rows, K]: row row_map[t, s] is x[t] * weights[t, s], every other one 0.
struct PermuteArgs {
  at::Tensor x, row_map;
  op::OptionalTensor weights;
  c10::SymInt rows;
  static constexpr auto kFields =
      std::tuple{op::field<&PermuteArgs::x>("x"), op::field<&PermuteArgs::row_map>("row_map"),
                 op::field<&PermuteArgs::weights>("weights"), op::field<&PermuteArgs::rows>("rows")};
};

struct PermuteFwd : OpBase {
  static constexpr const char* kName = "permute_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire::permute";
  using Args = PermuteArgs;
  static constexpr std::array kResults{"y"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a);
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// y [rows, K], row_map int32 [T, S], weights float32 [T, S] or none -> x [T, K] in y's dtype: the float32 sum over s,
/// in order, of y[row_map[t, s]] * weights[t, s].
struct UnpermuteArgs {
  at::Tensor y, row_map;
  op::OptionalTensor weights;
  static constexpr auto kFields =
      std::tuple{op::field<&UnpermuteArgs::y>("y"), op::field<&UnpermuteArgs::row_map>("row_map"),
                 op::field<&UnpermuteArgs::weights>("weights")};
};

struct UnpermuteFwd : OpBase {
  static constexpr const char* kName = "unpermute_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire::unpermute";
  using Args = UnpermuteArgs;
  static constexpr std::array kResults{"x"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a);
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The gradient of weights, float32 [T, S]: dot products of y[row_map[t, s]] and x[t].
struct UnpermuteDot : OpBase {
  static constexpr const char* kName = "unpermute_dot";
  static constexpr auto kText = op::gradient_of("permute and unpermute");
  static constexpr const char* kNotDifferentiable = kText.data();
  struct Args {
    at::Tensor y, row_map, x;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::y>("y"), op::field<&Args::row_map>("row_map"), op::field<&Args::x>("x")};
  };
  static constexpr std::array kResults{"dweights"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a);
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The differentiable operators: x and weights have gradients. Weights that need one keep x (or y) for it.
struct Permute : OpBase {
  static constexpr const char* kName = "permute";
  using Args = PermuteArgs;
  static constexpr auto kResults = PermuteFwd::kResults;

  struct Saved {
    op::OptionalTensor x;
    at::Tensor row_map;
    op::OptionalTensor weights;
    static constexpr auto kFields = std::tuple{op::field<&Saved::x>("x"), op::field<&Saved::row_map>("row_map"),
                                               op::field<&Saved::weights>("weights")};
  };

  static op::Tensors<1> inference(const Args& a);
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<3> backward(const Saved& s, const op::Tensors<1>& grads, op::Needs need);
};

struct Unpermute : OpBase {
  static constexpr const char* kName = "unpermute";
  using Args = UnpermuteArgs;
  static constexpr auto kResults = UnpermuteFwd::kResults;

  struct Saved {
    op::OptionalTensor y;
    at::Tensor row_map;
    op::OptionalTensor weights;
    c10::SymInt rows;
    static constexpr auto kFields = std::tuple{op::field<&Saved::y>("y"), op::field<&Saved::row_map>("row_map"),
                                               op::field<&Saved::weights>("weights"), op::field<&Saved::rows>("rows")};
  };

  static op::Tensors<1> inference(const Args& a);
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs need);
  static op::Tensors<3> backward(const Saved& s, const op::Tensors<1>& grads, op::Needs need);
};

}  // namespace quire_torch
