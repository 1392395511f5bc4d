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

/// `needs` of an inner backward operator. external: the gradient of w is computed elsewhere, of columnwise dy.
inline int64_t needed_gradients(op::Needs need, bool external = false) {
  return (need[kX] ? kNeedsX : 0) | (!need[kW] ? 0 : external ? kKeepsDy : kNeedsW) | (need[kBias] ? kNeedsBias : 0);
}

/// Whether backward multiplies codes, of dy too, rather than values.
inline bool from_codes(quire::Backward mode) {
  return mode == quire::Backward::quantized || mode == quire::Backward::requantized;
}

/// The rows of the matrix [M, K] that t is.
inline c10::SymInt rows_of(const at::Tensor& t) {
  const auto sizes = shape<c10::SymInt>(t);
  return quire::product(sizes, 0, sizes.size() - 1);
}

inline SpecText text_of(const quire::QuantSpec& spec) { return SpecText::parse(spec.to_string()); }

/// Data, scale and amax of one direction.
using DirectionBuffers = std::array<at::Tensor, 3>;

/// dy [*, N] is quantized as the recipe says and gives for each group (numerics.md 6.1, 6.6, 0.19)
///   dx    [*, K]    = dy rowwise * w columnwise,     in `dtype`; zero in rows beyond the last group
///   dw    [E, N, K] = dy columnwise * x columnwise,  in `dtype`; zero for a group without tokens
///   dbias [E, N]    = sum of the unquantized dy over rows, in dy's dtype
/// of which `needs` has bits; without offsets dw is [N, K] and dbias [N]. kKeepsDy: instead of dw, columnwise dy is
/// returned in flat buffers.
/// x_*: the columnwise buffers that linear_fwd returned. w_buffers: w columnwise, six buffers for each group as it was
/// given quantized, or six flat ones of all, such as that returned.
/// sr_state: int64 [2] = {seed, counter c}; stochastic rounding draws with offsets 2c (rowwise) and 2c + 1
/// (columnwise), group e with seed + e. bwd_scale: float32 [2 E] of delayed scaling, dy in each group and E that are
/// not used here; dy_amax [E] is then returned. given_amax: of dy in the one direction that `needs` asks for, as
/// grouped_quantize takes it. part: dy is a part of a larger one along its columns, and draws as it does there
/// (quantize.h).
struct LinearBwd : OpBase {
  static constexpr const char* kName = "linear_bwd";
  static constexpr auto kText = op::gradient_of("linear");
  static constexpr const char* kNotDifferentiable = kText.data();
  struct Args {
    at::Tensor dy;
    op::OptionalTensor offsets;
    at::Tensor x_data, x_scale, x_amax;
    OptionalTensors w_buffers;
    c10::SymInt in_features;
    RecipeText recipe;
    at::ScalarType dtype;
    int64_t needs;
    std::optional<at::Tensor> sr_state{}, bwd_scale{}, given_amax{}, part{};
    static constexpr auto kFields = std::tuple{op::field<&Args::dy>("dy"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::x_data>("x_data"),
                                               op::field<&Args::x_scale>("x_scale"),
                                               op::field<&Args::x_amax>("x_amax"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::in_features>("in_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::needs>("needs"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::bwd_scale>("bwd_scale", "None"),
                                               op::field<&Args::given_amax>("given_amax", "None"),
                                               op::field<&Args::part>("part", "None")};
  };
  static constexpr std::array kResults{"dx", "dw", "dbias", "dy_data", "dy_scale", "dy_amax"};

  template <class Int>
  static std::array<op::Result<Int>, 6> results(const Args& a);
  static void run(const Args& a, op::Tensors<6>& out, const quire::Context& context);
};

/// The same gradients as products of plain x and w, in `dtype`: what a layer without a recipe computes, and
/// backward_override asks for (numerics.md 6.8). x [*, K], read for dw. w: E matrices, or one [E, N, K]; or none, and
/// its rowwise codes under `recipe` in w_buffers.
struct LinearUnquantizedBwd : OpBase {
  static constexpr const char* kName = "linear_unquantized_bwd";
  static constexpr const char* kNotDifferentiable = LinearBwd::kNotDifferentiable;
  struct Args {
    at::Tensor dy;
    op::OptionalTensor offsets;
    at::Tensor x;
    op::TensorList w;
    OptionalTensors w_buffers;
    c10::SymInt in_features;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    int64_t needs;
    static constexpr auto kFields = std::tuple{op::field<&Args::dy>("dy"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::in_features>("in_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::needs>("needs")};
  };
  static constexpr std::array kResults{"dx", "dw", "dbias"};

  template <class Int>
  static std::array<op::Result<Int>, 3> results(const Args& a);
  static void run(const Args& a, op::Tensors<3>& out, const quire::Context& context);
};

}  // namespace quire_torch
