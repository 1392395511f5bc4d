// quire::permute and quire::unpermute: rows to expert order and back (moe-reference.md 2). They are adjoint: the
// gradient of one is the other.
#pragma once

#include <utility>

#include "quire_torch/op/autograd.h"
#include "quire_torch/ops/row_map.h"

namespace quire_torch {

/// Throws unless row_map is int32 [tokens, slots] and weights, if any, float32 of the same sizes, both on the device of
/// `rows`, which is [*, K]. what, name: the operator, and its name of `rows`.
template <class Int>
void check_row_map(const char* what, const char* name, const at::Tensor& rows, const at::Tensor& row_map,
                   const op::OptionalTensor& weights) {
  quire::check(rows.dim() == 2, what, ": ", name, " must be a matrix, got ", rows.dim(), " dimensions; use .reshape()");
  check_ids(row_map, what, ": row_map");
  quire::check(row_map.dim() == 2, what, ": row_map must be [tokens, slots], got ", op::sizes<Int>(row_map));
  check_one_device(row_map.device(), rows.device(), what, ": row_map and ", name);
  if (!weights) return;
  check_one_device(weights->device(), rows.device(), what, ": weights and ", name);
  quire::check(weights->scalar_type() == at::kFloat && weights->dim() == 2 &&
                   may_equal(op::size<Int>(*weights, 0), op::size<Int>(row_map, 0)) &&
                   may_equal(op::size<Int>(*weights, 1), op::size<Int>(row_map, 1)),
               what, ": weights must be float32 with the sizes of row_map, ", op::sizes<Int>(row_map), "; got ",
               weights->scalar_type(), " ", op::sizes<Int>(*weights),
               "; pass one weight for each id, converted with .float()");
}

template <class Int>
void check_tokens(const at::Tensor& tokens, const at::Tensor& row_map) {
  quire::check(may_equal(op::size<Int>(tokens, 0), op::size<Int>(row_map, 0)), "permute: x and row_map must have the ",
               "same tokens; got ", op::size<Int>(tokens, 0), " and ", op::size<Int>(row_map, 0));
}

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
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_row_map<Int>("permute", "x", a.x, a.row_map, a.weights);
    check_tokens<Int>(a.x, a.row_map);
    if (dtype(a.x.scalar_type(), "permute: x") == quire::DType::u8)
      quire::check(!a.weights, "permute: x of uint8 has no weights; leave them out, or dequantize x");
    return {op::Result<Int>{{op::as<Int>(a.rows), op::size<Int>(a.x, 1)}, a.x.scalar_type()}};
  }
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
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_input(a.y, "unpermute: y");
    check_row_map<Int>("unpermute", "y", a.y, a.row_map, a.weights);
    return {op::Result<Int>{{op::size<Int>(a.row_map, 0), op::size<Int>(a.y, 1)}, a.y.scalar_type()}};
  }
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
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_input(a.x, "unpermute_dot: x");
    check_input(a.y, "unpermute_dot: y");
    check_row_map<Int>("unpermute_dot", "y", a.y, a.row_map, {});
    check_tokens<Int>(a.x, a.row_map);
    return {op::Result<Int>{{op::size<Int>(a.row_map, 0), op::size<Int>(a.row_map, 1)}, at::kFloat}};
  }
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
