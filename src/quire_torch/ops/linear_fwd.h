// y = x w^T + bias, of all rows of x or of groups of them, each with a w and a bias of its own. The inner forward
// operator: what training graphs contain.
#pragma once

#include "quire_torch/ops/groups.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

using OptionalTensors = op::OptionalTensorList;

/// Which operands linear_fwd keeps for backward (bits of `save`).
inline constexpr int64_t kSaveX = 1, kSaveW = 2;

/// Columnwise, but for a backward pass that decodes what forward multiplied.
inline quire::Direction saved_direction(const quire::LinearSpec& recipe) {
  return recipe.backward == quire::Backward::dequantized ? quire::Direction::rowwise : quire::Direction::columnwise;
}

/// Throws unless x [*, K] and w [N, K] agree: linear_fwd does not see a w that is given quantized.
void check_agreement(const at::Tensor& x, const at::Tensor& w);

/// x [*, K] and w [..., N, K]. Raises RuntimeError.
void check_k(const at::Tensor& x, const at::Tensor& w);

/// Throws unless a list has a tensor of `each` sizes for each group, or one for all of them, on `device`.
template <class Int>
void check_list(const op::TensorList& list, int64_t groups, const quire::Shape<Int>& each, const char* what,
                at::Device device) {
  const bool stacked = list.size() == 1 && list[0].dim() == static_cast<int64_t>(each.size()) + 1;
  quire::check(stacked || static_cast<int64_t>(list.size()) == groups, what, " must be one tensor for each of the ",
               groups, " groups of rows, or one with a leading dimension of groups; got ", list.size());
  quire::Shape<Int> wanted;
  if (stacked) wanted.push_back(Int(groups));
  for (const Int& size : each) wanted.push_back(size);
  for (const at::Tensor& t : list) {
    check_input(t, what);
    const auto got = shape<Int>(t);
    bool fits = got.size() == wanted.size();
    for (size_t i = 0; fits && i < got.size(); ++i) fits = got[i] == wanted[i];
    quire::check(fits, what, " must be ", c10::ArrayRef<Int>(wanted), ", got ", c10::ArrayRef<Int>(got));
    check_one_device(t.device(), device, what, " and x");
  }
}

/// x [*, K], whose rows (T in all) belong to E groups as offsets [E] says (groups.h), or are one group without them;
/// w: E matrices [N, K], or one [E, N, K]; bias: none, E vectors [N], or one [E, N]. For each group x and w, both
/// rowwise, give y [*, N] in `dtype` (numerics.md 6.1, 0.19); rows beyond the last group are zero. N = out_features.
/// Operands asked for by `save` are returned quantized in the direction that backward reads (saved_direction), in flat
/// buffers (quire/spec/groups.h).
/// recipe: "" multiplies x and w as they are, in `dtype`. x_buffers: x is given quantized, as its six buffers, which of
/// groups are flat, and tells only shape and dtype. w_buffers: w is given quantized, as six buffers for each group or
/// flat ones of all, and is not read unless w_fingerprint is given: int64 [E], of each w when its buffers were made;
/// throws where one has changed since. fwd_scale: delayed scaling, float32 [3 E], of x in each group, w in each, and E
/// that are not used; x_amax and w_amax [E] are then returned, w_amax unless w is given.
struct LinearFwd : OpBase {
  static constexpr const char* kName = "linear_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call quire.Linear";
  struct Args {
    at::Tensor x;
    op::TensorList w, bias;
    op::OptionalTensor offsets;
    c10::SymInt out_features;
    OptionalRecipeText recipe;
    at::ScalarType dtype;
    int64_t save;
    OptionalTensors x_buffers{}, w_buffers{};
    std::optional<at::Tensor> w_fingerprint{}, fwd_scale{};
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::bias>("bias"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::out_features>("out_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::save>("save"),
                                               op::field<&Args::x_buffers>("x_buffers"),
                                               op::field<&Args::w_buffers>("w_buffers"),
                                               op::field<&Args::w_fingerprint>("w_fingerprint", "None"),
                                               op::field<&Args::fwd_scale>("fwd_scale", "None")};
  };
  static constexpr std::array kResults{"y", "x_data", "x_scale", "x_amax", "w_data", "w_scale", "w_amax"};

  template <class Int>
  static std::array<op::Result<Int>, 7> results(const Args& a) {
    check_input(a.x, "linear: x");
    const int64_t groups = group_count(a.offsets, a.x, "linear");
    check_arguments<Int>(a, groups);
    op::Result<Int> y{{}, a.dtype};
    const auto x = shape<Int>(a.x);
    y.sizes.append(x.begin(), x.end());
    y.sizes.back() = op::as<Int>(a.out_features);
    const op::Result<Int> none = op::absent<Int>(at::kByte), amax{{Int(groups)}, at::kFloat};
    if (!a.recipe->has_value()) return {y, none, none, none, none, none, none};
    const quire::LinearSpec& recipe = **a.recipe;
    const quire::Direction direction = saved_direction(recipe);
    auto kept_x =
        rows_results<Int>(recipe.x, {quire::product(x, 0, x.size() - 1), x.back(), groups}, a.offsets.has_value(),
                          direction, (a.save & kSaveX) && a.x_buffers.empty() && !recipe.weight_only);
    auto kept_w = stacked_results<Int>(recipe.w, {y.sizes.back(), x.back()}, groups, direction,
                                       (a.save & kSaveW) && a.w_buffers.empty());
    if (a.fwd_scale && a.x_buffers.empty()) kept_x[2] = amax;
    if (a.fwd_scale && a.w_buffers.empty()) kept_w[2] = amax;
    return {y, kept_x[0], kept_x[1], kept_x[2], kept_w[0], kept_w[1], kept_w[2]};
  }
  static void run(const Args& a, op::Tensors<7>& out, const quire::Context& context);

 private:
  template <class Int>
  static void check_arguments(const Args& a, int64_t groups) {
    const Int n = op::as<Int>(a.out_features), k = op::size<Int>(a.x, -1);
    quire::check(a.save >= 0 && a.save <= (kSaveX | kSaveW), "linear_fwd: save must be a sum of ", kSaveX,
                 " for x and ", kSaveW, " for w, got ", a.save);
    quire::check(a.recipe->has_value() || !a.fwd_scale,
                 "linear: fwd_scale is given, and recipe '' quantizes nothing; give a recipe, or no scale");
    quire::check(a.recipe->has_value() || (a.w_buffers.empty() && a.x_buffers.empty()),
                 "linear: an operand is given quantized, and recipe '' multiplies x and w themselves; "
                 "dequantize it, or give a recipe");
    const bool weight_only = a.recipe->has_value() && (*a.recipe)->weight_only;
    quire::check(!weight_only || a.x_buffers.empty(),
                 "linear: x is given quantized, and a recipe with x=none multiplies x itself; dequantize it");
    quire::check(!weight_only || !a.fwd_scale,
                 "linear: delayed scaling needs a spec for x, and the recipe has x=none; give x and dy specs");
    quire::check(!a.w.empty() || !a.w_buffers.empty(), "linear: w is absent; pass it or w_buffers");
    if (!a.w.empty()) check_list<Int>(a.w, groups, {n, k}, "linear: w", a.x.device());
    if (!a.bias.empty()) check_list<Int>(a.bias, groups, {n}, "linear: bias", a.x.device());
    const auto buffers = static_cast<int64_t>(a.w_buffers.size());
    quire::check(buffers == 0 || buffers == 6 || buffers == 6 * groups,
                 "linear: w_buffers must be the six of quire.TensorProto for each of ", groups,
                 " groups, or six flat ones of all; got ", buffers);
    check_result_dtype(a.dtype, "linear: dtype");
  }
};

}  // namespace quire_torch
