// Gradients of w that go into memory of the caller's instead of to autograd: `Into` is one tensor, or a list of them
// (an operator of its own, because PyTorch's nested compile regions take no operator that writes to a list).
#pragma once

#include <string_view>

#include "quire_torch/op/op.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// A bound of the rows of columnwise codes: an element has half a byte at least. Counts of buffers below it do not
/// wrap.
int64_t most_tokens(const at::Tensor& dy_data, const at::Tensor& x_data);

/// dw = dy columnwise * x columnwise of each group, of buffers that linear_bwd (kKeepsDy) and linear_fwd returned,
/// added to `main_grad` in its dtype, or written over it (numerics.md 6.7): [N, K], [E, N, K], or E matrices [N, K].
/// tokens: rows of x and dy. offsets [E]: as for linear_fwd; without them one group has all rows.
template <class Into>
struct Wgrad : OpBase {
  static constexpr const char* kName = std::same_as<Into, at::Tensor> ? "wgrad_" : "grouped_wgrad_";
  struct Args {
    op::Mutable<Into> main_grad;
    at::Tensor dy_data, dy_scale, dy_amax;
    at::Tensor x_data, x_scale, x_amax;
    op::OptionalTensor offsets;
    c10::SymInt tokens;
    RecipeText recipe;
    bool overwrite;
    static constexpr auto kFields = std::tuple{op::field<&Args::main_grad>("main_grad"),
                                               op::field<&Args::dy_data>("dy_data"),
                                               op::field<&Args::dy_scale>("dy_scale"),
                                               op::field<&Args::dy_amax>("dy_amax"),
                                               op::field<&Args::x_data>("x_data"),
                                               op::field<&Args::x_scale>("x_scale"),
                                               op::field<&Args::x_amax>("x_amax"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::tokens>("tokens"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::overwrite>("overwrite", "False")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// main_grad += value, or = value, elementwise in float32 and rounded once to main_grad's dtype. Both [N, K], or
/// [E, N, K]; then main_grad may be E matrices [N, K].
template <class Into>
struct Accumulate : OpBase {
  static constexpr const char* kName = std::same_as<Into, at::Tensor> ? "accumulate_" : "grouped_accumulate_";
  struct Args {
    op::Mutable<Into> main_grad;
    at::Tensor value;
    bool overwrite;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::main_grad>("main_grad"), op::field<&Args::value>("value"),
                   op::field<&Args::overwrite>("overwrite", "False")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// Calls one of the two for a list of main_grad.
template <template <class> class Op>
void call_into(const op::TensorList& main_grad, auto&&... arguments) {
  if (main_grad.size() == 1)
    op::call<Op<at::Tensor>>({{main_grad[0]}, arguments...});
  else
    op::call<Op<op::TensorList>>({{main_grad}, arguments...});
}

}  // namespace quire_torch
