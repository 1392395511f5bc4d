// The gradients of grouped_linear. The inner backward operators: what training graphs contain.
#pragma once

#include "quire_torch/ops/grouped_linear_fwd.h"
#include "quire_torch/ops/linear_bwd.h"

namespace quire_torch {

/// dx, dw and dbias of a backward operator, as `needs` says; op: its name, for errors.
template <class Int, class Args>
std::array<op::Result<Int>, 3> gradient_results(const Args& a, const char* op) {
  const int64_t groups = group_count(a.offsets, a.dy, op);
  const Int n = op::size<Int>(a.dy, -1), k = op::as<Int>(a.in_features);
  auto dx = shape<Int>(a.dy);
  dx.back() = k;
  return {needed(a.needs & kNeedsX, dx, a.dtype), needed<Int>(a.needs & kNeedsW, {Int(groups), n, k}, a.dtype),
          needed<Int>(a.needs & kNeedsBias, {Int(groups), n}, a.dy.scalar_type())};
}

/// For each group what linear_bwd computes: dx [*, K] (zero in rows beyond the last group), dw [E, N, K] and dbias
/// [E, N] (zero for a group without tokens), of which `needs` has the bits of linear_bwd. kKeepsDy: instead of dw,
/// columnwise dy is returned in flat buffers.
/// x_*: the columnwise buffers that grouped_linear_fwd returned. w_buffers: w columnwise, six buffers for each group as
/// it was given quantized, or six flat ones of all, such as that returned.
/// sr_state: int64 [2] {seed, counter}; group e draws with seed + e. bwd_scale: float32 [2 E] of delayed scaling, dy in
/// each group and E that are not used here; dy_amax [E] is then returned.
struct GroupedLinearBwd : OpBase {
  static constexpr const char* kName = "grouped_linear_bwd";
  static constexpr const char* kNotDifferentiable = LinearBwd::kNotDifferentiable;
  struct Args {
    at::Tensor dy, offsets;
    at::Tensor x_data, x_scale, x_amax;
    OptionalTensors w_buffers;
    c10::SymInt in_features;
    RecipeText recipe;
    at::ScalarType dtype;
    int64_t needs;
    std::optional<at::Tensor> sr_state{}, bwd_scale{};
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
                                               op::field<&Args::bwd_scale>("bwd_scale", "None")};
  };
  static constexpr std::array kResults{"dx", "dw", "dbias", "dy_data", "dy_scale", "dy_amax"};

  template <class Int>
  static std::array<op::Result<Int>, 6> results(const Args& a) {
    check_input(a.dy, "grouped_linear_bwd: dy");
    check_needs(a.needs, "grouped_linear_bwd");
    const auto [dx, dw, dbias] = gradient_results<Int>(a, "grouped_linear_bwd");
    const auto dy = shape<Int>(a.dy);
    const int64_t groups = group_count(a.offsets, a.dy, "grouped_linear_bwd");
    auto q = grouped_results<Int>(a.recipe->dy, {quire::product(dy, 0, dy.size() - 1), dy.back(), groups},
                                  quire::Direction::columnwise, (a.needs & kKeepsDy) != 0);
    if (a.bwd_scale && (a.needs & (kNeedsX | kNeedsW | kKeepsDy))) q[2] = {{Int(groups)}, at::kFloat};
    return {dx, dw, dbias, q[0], q[1], q[2]};
  }
  static void run(const Args& a, op::Tensors<6>& out, const quire::Context& context);
};

/// dw of each group, of columnwise buffers that grouped_linear_bwd (kKeepsDy) and grouped_linear_fwd returned, added to
/// main_grad, or written over it: E matrices [N, K], or one [E, N, K].
struct GroupedWgrad : OpBase {
  static constexpr const char* kName = "grouped_wgrad_";
  struct Args {
    op::Mutable<op::TensorList> main_grad;
    at::Tensor dy_data, dy_scale, dy_amax;
    at::Tensor x_data, x_scale, x_amax;
    at::Tensor offsets;
    RecipeText recipe;
    bool overwrite;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::main_grad>("main_grad"), op::field<&Args::dy_data>("dy_data"),
                   op::field<&Args::dy_scale>("dy_scale"),   op::field<&Args::dy_amax>("dy_amax"),
                   op::field<&Args::x_data>("x_data"),       op::field<&Args::x_scale>("x_scale"),
                   op::field<&Args::x_amax>("x_amax"),       op::field<&Args::offsets>("offsets"),
                   op::field<&Args::recipe>("recipe"),       op::field<&Args::overwrite>("overwrite", "False")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// value [E, N, K] added to main_grad, or written over it, as accumulate_ does with one matrix.
struct GroupedAccumulate : OpBase {
  static constexpr const char* kName = "grouped_accumulate_";
  struct Args {
    op::Mutable<op::TensorList> main_grad;
    at::Tensor value;
    bool overwrite;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::main_grad>("main_grad"), op::field<&Args::value>("value"),
                   op::field<&Args::overwrite>("overwrite", "False")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// The same gradients as products of plain x and w, in `dtype`: what a layer without a recipe computes, and
/// backward_override asks for (numerics.md 6.8). x [*, K], read for dw. w: E matrices, or one [E, N, K]; or none, and
/// its rowwise codes under `recipe` in w_buffers.
struct GroupedPlainBwd : OpBase {
  static constexpr const char* kName = "grouped_plain_bwd";
  static constexpr const char* kNotDifferentiable = LinearBwd::kNotDifferentiable;
  struct Args {
    at::Tensor dy, offsets, x;
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
  static std::array<op::Result<Int>, 3> results(const Args& a) {
    check_input(a.dy, "grouped_plain_bwd: dy");
    check_needs(a.needs, "grouped_plain_bwd");
    const auto gradients = gradient_results<Int>(a, "grouped_plain_bwd");
    if ((a.needs & kNeedsX) && a.w.empty())
      quire::check(a.recipe->has_value(), "grouped_plain_bwd: w is absent; pass it, or its codes and a recipe");
    else if (a.needs & kNeedsX)
      check_list<Int>(a.w, group_count(a.offsets, a.dy, "grouped_plain_bwd"),
                      {op::size<Int>(a.dy, -1), op::as<Int>(a.in_features)}, "grouped_plain_bwd: w", a.dy.device());
    return gradients;
  }
  static void run(const Args& a, op::Tensors<3>& out, const quire::Context& context);
};

}  // namespace quire_torch
