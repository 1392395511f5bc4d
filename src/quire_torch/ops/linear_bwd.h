// The gradients of y = x w^T + bias. The inner backward operator: what training graphs contain.
#pragma once

#include "quire_torch/ops/linear_fwd.h"

namespace quire_torch {

/// Which gradients linear_bwd computes (bits of `needs`); the others are absent.
inline constexpr int64_t kNeedsX = 1, kNeedsW = 2, kNeedsBias = 4;

/// dy [*, N] is quantized as the recipe says and gives (numerics.md 6.1, 6.6)
///   dx    [*, K] = dy rowwise * w columnwise,          in `dtype`
///   dw    [N, K] = dy columnwise * x columnwise,       in `dtype`, or added to `accumulate` in its dtype
///   dbias [N]    = sum of the unquantized dy over rows, in dy's dtype
/// x_*, w_*: the columnwise buffers that linear_fwd returned; needed for dw and dx.
/// sr_state: int64 [2] = {seed, counter c}; stochastic rounding draws with offsets 2c (rowwise) and 2c + 1
/// (columnwise). dy_buffers: dy is given already quantized, as six buffers, and dy tells only shape and dtype.
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
    OptionalTensors dy_buffers{};
    std::optional<at::Tensor> sr_state{}, dy_scale{}, accumulate{};
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
                                               op::field<&Args::dy_buffers>("dy_buffers"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::dy_scale>("dy_scale", "None"),
                                               op::field<&Args::accumulate>("accumulate", "None")};
  };
  static constexpr std::array kResults{"dx", "dw", "dbias", "dy_amax"};

  template <class Int>
  static std::array<op::Result<Int>, 4> results(const Args& a) {
    check_input(a.dy, "linear_bwd: dy");
    const Int n = op::size<Int>(a.dy, -1), k = op::as<Int>(a.in_features);
    auto dx = shape<Int>(a.dy);
    dx.back() = k;
    const auto present = [&](int64_t bit, const quire::Shape<Int>& sizes, at::ScalarType t) {
      op::Result<Int> r = op::absent<Int>(t);
      if (a.needs & bit) {
        r.sizes.clear();
        r.sizes.append(sizes.begin(), sizes.end());
      }
      return r;
    };
    auto dy_amax = op::absent<Int>(at::kFloat);
    if (a.dy_scale) dy_amax.sizes = {Int(1)};
    const at::ScalarType dw = a.accumulate ? a.accumulate->scalar_type() : a.dtype;
    return {present(kNeedsX, dx, a.dtype), present(kNeedsW, {n, k}, dw), present(kNeedsBias, {n}, a.dy.scalar_type()),
            dy_amax};
  }
  static void cpu(const Args& a, op::Tensors<4>& out);
};

/// counter += 1 of sr_state {seed, counter}: once per backward of a module, after its linear_bwd.
struct SrAdvance : OpBase {
  static constexpr const char* kName = "sr_advance_";
  struct Args {
    op::Mutable<at::Tensor> sr_state;
    static constexpr auto kFields = std::tuple{op::field<&Args::sr_state>("sr_state")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void cpu(const Args& a);
};

/// {seed, counter}; throws unless it is an int64 [2] tensor.
void check_sr_state(const at::Tensor& state);

}  // namespace quire_torch
