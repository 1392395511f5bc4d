// The gradients of y = x w^T + bias. The inner backward operators: what training graphs contain.
#pragma once

#include "quire_torch/op/op.h"
#include "quire_torch/ops/linear_fwd.h"

namespace quire_torch {

/// Which gradients linear_bwd computes (bits of `needs`); the others are absent. kKeepsDy: instead of dw, columnwise dy
/// is returned, for a weight gradient that is computed elsewhere.
inline constexpr int64_t kNeedsX = 1, kNeedsW = 2, kNeedsBias = 4, kKeepsDy = 8;

/// Positions of x, w and bias among the tensors of an outer operator, for op::Needs and for the order of gradients.
enum Input : size_t { kX, kW, kBias };

/// `needs` of an inner backward operator. apart: the gradient of w is computed elsewhere, of columnwise dy.
inline int64_t needed_gradients(op::Needs need, bool apart = false) {
  return (need[kX] ? kNeedsX : 0) | (!need[kW] ? 0 : apart ? kKeepsDy : kNeedsW) | (need[kBias] ? kNeedsBias : 0);
}

/// Whether backward multiplies codes, of dy too, rather than values.
inline bool from_codes(quire::Backward mode) {
  return mode == quire::Backward::quantized || mode == quire::Backward::requantized;
}

/// Throws if `needs` has another bit than these.
inline void check_needs(int64_t needs, const char* op) {
  constexpr int64_t kAll = kNeedsX | kNeedsW | kNeedsBias | kKeepsDy;
  quire::check((needs & ~kAll) == 0, op, ": needs must be a sum of 1 (dx), 2 (dw), 4 (dbias) and 8 (dy), got ", needs);
}

inline SpecText text_of(const quire::QuantSpec& spec) { return SpecText::parse(spec.to_string()); }

/// Data, scale and amax of one direction.
using Three = std::array<at::Tensor, 3>;

/// A gradient among the results of a backward operator; absent where it is not needed.
template <class Int>
op::Result<Int> needed(int64_t wanted, const quire::Shape<Int>& sizes, at::ScalarType dtype) {
  op::Result<Int> r = op::absent<Int>(dtype);
  if (wanted == 0) return r;
  r.sizes.clear();
  r.sizes.append(sizes.begin(), sizes.end());
  return r;
}

/// dy [*, N] is quantized as the recipe says and gives (numerics.md 6.1, 6.6)
///   dx    [*, K] = dy rowwise * w columnwise,          in `dtype`
///   dw    [N, K] = dy columnwise * x columnwise,       in `dtype`
///   dbias [N]    = sum of the unquantized dy over rows, in dy's dtype
/// x_*, w_*: the columnwise buffers that linear_fwd returned; needed for dw and dx.
/// sr_state: int64 [2] = {seed, counter c}; stochastic rounding draws with offsets 2c (rowwise) and 2c + 1
/// (columnwise). dy_scale: given scale of dy (delayed scaling); its amax is returned.
struct LinearBwd : OpBase {
  static constexpr const char* kName = "linear_bwd";
  static constexpr const char* kNotDifferentiable =
      "has no gradient: linear is once differentiable, so a second derivative (create_graph=True) through it is not "
      "available";
  struct Args {
    at::Tensor dy;
    at::Tensor x_data, x_scale, x_amax;
    at::Tensor w_data, w_scale, w_amax;
    c10::SymInt in_features;
    RecipeText recipe;
    at::ScalarType dtype;
    int64_t needs;
    std::optional<at::Tensor> sr_state{}, dy_scale{};
    static constexpr auto kFields = std::tuple{op::field<&Args::dy>("dy"),
                                               op::field<&Args::x_data>("x_data"),
                                               op::field<&Args::x_scale>("x_scale"),
                                               op::field<&Args::x_amax>("x_amax"),
                                               op::field<&Args::w_data>("w_data"),
                                               op::field<&Args::w_scale>("w_scale"),
                                               op::field<&Args::w_amax>("w_amax"),
                                               op::field<&Args::in_features>("in_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::needs>("needs"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::dy_scale>("given_dy_scale", "None")};
  };
  static constexpr std::array kResults{"dx", "dw", "dbias", "dy_data", "dy_scale", "dy_amax"};

  template <class Int>
  static std::array<op::Result<Int>, 6> results(const Args& a) {
    check_input(a.dy, "linear_bwd: dy");
    check_needs(a.needs, "linear_bwd");
    const Int n = op::size<Int>(a.dy, -1), k = op::as<Int>(a.in_features);
    const auto dy = shape<Int>(a.dy);
    auto dx = dy;
    dx.back() = k;
    auto q = kept<Int>(a.recipe->dy, dy, (a.needs & kKeepsDy) != 0);
    if (a.dy_scale && (a.needs & (kNeedsX | kNeedsW | kKeepsDy))) q[2] = {{Int(1)}, at::kFloat};
    return {needed(a.needs & kNeedsX, dx, a.dtype),
            needed<Int>(a.needs & kNeedsW, {n, k}, a.dtype),
            needed<Int>(a.needs & kNeedsBias, {n}, a.dy.scalar_type()),
            q[0],
            q[1],
            q[2]};
  }
  static void run(const Args& a, op::Tensors<6>& out, const quire::Context& context);
};

/// Where dy's rounding takes its bits in the backward pass that sr_state stands at when the kernel runs; none for a
/// spec that rounds to nearest. Throws where sr_state is absent or wrong.
quire::Randomness randomness(const quire::QuantSpec& dy, const std::optional<at::Tensor>& sr_state);

/// Throws unless t is a contiguous float matrix.
void check_main_grad(const at::Tensor& t, const char* what);

/// Throws unless t is one with the sizes of the weight; op: "linear".
void check_destination(const at::Tensor& t, c10::SymIntArrayRef weight, const char* op);

/// A bound of the rows of columnwise codes: an element has half a byte at least. Counts of buffers below it do not
/// wrap.
int64_t most_tokens(const at::Tensor& dy_data, const at::Tensor& x_data);

/// Throws unless accumulate_ can add value to main_grad.
void check_addend(const at::Tensor& main_grad, const at::Tensor& value, const char* op);

/// dw = dy columnwise * x columnwise of buffers that linear_bwd (kKeepsDy) and linear_fwd returned, added to
/// `main_grad` [N, K] in its dtype, or written over it (numerics.md 6.7). tokens: rows of x and dy.
struct Wgrad : OpBase {
  static constexpr const char* kName = "wgrad_";
  struct Args {
    op::Mutable<at::Tensor> main_grad;
    at::Tensor dy_data, dy_scale, dy_amax;
    at::Tensor x_data, x_scale, x_amax;
    c10::SymInt tokens;
    RecipeText recipe;
    bool overwrite;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::main_grad>("main_grad"), op::field<&Args::dy_data>("dy_data"),
                   op::field<&Args::dy_scale>("dy_scale"),   op::field<&Args::dy_amax>("dy_amax"),
                   op::field<&Args::x_data>("x_data"),       op::field<&Args::x_scale>("x_scale"),
                   op::field<&Args::x_amax>("x_amax"),       op::field<&Args::tokens>("tokens"),
                   op::field<&Args::recipe>("recipe"),       op::field<&Args::overwrite>("overwrite", "False")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// main_grad += value, or = value, elementwise in float32 and rounded once to main_grad's dtype.
struct Accumulate : OpBase {
  static constexpr const char* kName = "accumulate_";
  struct Args {
    op::Mutable<at::Tensor> main_grad;
    at::Tensor value;
    bool overwrite;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::main_grad>("main_grad"), op::field<&Args::value>("value"),
                   op::field<&Args::overwrite>("overwrite", "False")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

}  // namespace quire_torch
