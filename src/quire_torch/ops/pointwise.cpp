#include "quire_torch/ops/pointwise.h"

#include "quire/operations/operations.h"
#include "quire_torch/ops/operands.h"

namespace quire_torch {

// Results that may be quantized

namespace {

/// The columnwise buffers of a result that is quantized as it is computed, for the backward pass of a product. Of
/// scales [ceil(M / 32), K] and packed codes [K, ceil(M / 2)] tracing would ask whether that size is 1, and make a
/// graph of its own for as few tokens: scales are one-dimensional, packed codes one row ([0] would be an absent
/// result).
template <class Int>
std::array<op::Result<Int>, 3> kept(const quire::QuantSpec& spec, const quire::Shape<Int>& shape, bool wanted) {
  auto r = results(spec, shape, quire::Direction::columnwise, wanted);
  const auto elements = [](const op::Result<Int>& result) {
    return quire::product(quire::Shape<Int>(result.sizes.begin(), result.sizes.end()), 0, result.sizes.size());
  };
  if (wanted && spec.packed()) r[0].sizes = {Int(1), elements(r[0])};
  if (wanted) r[1].sizes = {elements(r[1])};
  return r;
}

/// y of these sizes and its buffers, where they are wanted. A y that is not is one zero, for with_carrier().
template <class Int>
std::array<op::Result<Int>, 7> produced_results(const ProducedFields& f, const quire::Shape<Int>& sizes,
                                                const char* what) {
  check_result_dtype(f.dtype, what, ": dtype");
  quire::check(f.quantized() == (f.rowwise || f.columnwise), what,
               f.quantized() ? ": rowwise and columnwise are both False; ask for at least one direction of the spec"
                             : ": a direction is asked for without a spec; pass both or neither");
  op::Result<Int> y{{Int(1)}, f.dtype};
  if (f.has_y()) {
    y.sizes.clear();
    y.sizes.append(sizes.begin(), sizes.end());
  }
  const quire::QuantSpec spec = f.spec->value_or(quire::QuantSpec{});
  const auto r = results(spec, sizes, quire::Direction::rowwise, f.rowwise), c = kept(spec, sizes, f.columnwise);
  return {y, r[0], r[1], r[2], c[0], c[1], c[2]};
}

/// Sets the one element of a y that is not wanted.
void clear_carrier(const ProducedFields& f, at::Tensor& y) {
  if (!f.has_y()) y.zero_();
}

/// Where a kernel puts it: the first seven results, of which y is [..., cols] in `rows` rows.
quire::Destination destination(const ProducedFields& f, at::Tensor* results, int64_t rows, int64_t cols,
                               const char* what) {
  quire::Destination to{
      .y = {f.has_y() ? results[0].mutable_data_ptr() : nullptr, dtype(f.dtype, what), rows, cols, cols}};
  clear_carrier(f, results[0]);
  if (!f.quantized()) return to;
  to.spec = **f.spec;
  if (f.rowwise) to.rowwise = side(results[1], results[2], results[3]);
  if (f.columnwise) to.columnwise = side(results[4], results[5], results[6]);
  to.scale = given_scale(f.scale, what, ": scale");
  return to;
}

/// The seven results with a carrier for a y that is not wanted: a tensor of y's sizes over one element, which is never
/// read and takes the gradient. The element is the inner operator's, since Inductor would compute a constant in full.
op::Tensors<7> with_carrier(const ProducedFields& f, at::Tensor* results, c10::SymIntArrayRef sizes) {
  op::Tensors<7> out;
  std::move(results, results + out.size(), out.begin());
  if (!f.has_y()) out[0] = out[0].expand_symint(sizes);
  return out;
}

}  // namespace

// Norms

namespace {

template <class Int>
void check_parameter(const at::Tensor& x, const at::Tensor& t, const char* what) {
  check_input(t, what);
  quire::check(t.dim() == 1 && op::size<Int>(t, 0) == op::size<Int>(x, -1), what, " must be [hidden_size] = [",
               op::size<Int>(x, -1), "], the last dimension of x; got ", op::sizes<Int>(t));
  check_one_device(t.device(), x.device(), what, " and x");
}

quire::Vector vector(const std::optional<MatrixView>& v) {
  return v ? quire::Vector{v->matrix().data, v->matrix().dtype} : quire::Vector{};
}

float* floats(at::Tensor& t) { return t.numel() ? t.mutable_data_ptr<float>() : nullptr; }

/// What the norm kept of its rows: float32 [rows].
const float* kept_moments(const at::Tensor& t, int64_t rows, const char* what) {
  quire::check(t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() == rows, "norm_bwd: ", what,
               " must be what norm_fwd returned: contiguous float32 [", rows, "], got ", t.scalar_type(), " ",
               t.sizes());
  return t.const_data_ptr<float>();
}

}  // namespace

Normalization Normalization::parse(std::string_view text) {
  for (const auto kind : {quire::NormKind::layer, quire::NormKind::rms})
    if (quire::name(kind) == text) return {kind};
  quire::fail("norm: normalization must be 'LayerNorm' or 'RMSNorm', got '", text, "'");
}

template <class Int>
std::array<op::Result<Int>, 9> NormFwd::results(const Args& a) {
  check_input(a.x, "norm: x");
  check_parameter<Int>(a.x, a.weight, "norm: weight");
  if (a.bias) {
    check_parameter<Int>(a.x, *a.bias, "norm: bias");
    quire::check(a.bias->scalar_type() == a.weight.scalar_type(), "norm: bias must have the dtype of weight; got ",
                 a.bias->scalar_type(), " and ", a.weight.scalar_type(), "; convert one with .to()");
  }
  const auto sizes = shape<Int>(a.x);
  const auto r = produced_results(a.out(), sizes, "norm");
  const op::Result<Int> rows{{quire::product(sizes, 0, sizes.size() - 1)}, at::kFloat};
  const bool has_mean = a.normalization.kind == quire::NormKind::layer;
  return {r[0], r[1], r[2], r[3], r[4], r[5], r[6], has_mean ? rows : op::absent<Int>(at::kFloat), rows};
}
template std::array<op::Result<int64_t>, 9> NormFwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 9> NormFwd::results<c10::SymInt>(const Args&);

void NormFwd::run(const Args& a, op::Tensors<9>& out, const quire::Context& context) {
  const MatrixView x(a.x, "norm: x");
  const std::optional<MatrixView> gamma(std::in_place, a.weight, "norm: weight");
  std::optional<MatrixView> beta;
  if (a.bias) beta.emplace(*a.bias, "norm: bias");
  const quire::Matrix& m = x.matrix();
  quire::norm({.kind = a.normalization.kind,
               .x = m,
               .gamma = vector(gamma),
               .beta = vector(beta),
               .zero_centered = a.zero_centered,
               .eps = static_cast<float>(a.eps),
               .out = destination(a.out(), out.data(), m.rows, m.cols, "norm"),
               .mean = floats(out[7]),
               .rstd = floats(out[8])},
              context);
}

template <class Int>
std::array<op::Result<Int>, 3> NormBwd::results(const Args& a) {
  check_input(a.dy, "norm_bwd: dy");
  check_input(a.x, "norm_bwd: x");
  check_parameter<Int>(a.x, a.weight, "norm_bwd: weight");
  const auto like = [&](int64_t bit, const at::Tensor& t) {
    op::Result<Int> r = op::absent<Int>(t.scalar_type());
    if (a.needs & bit) r.sizes.assign(op::sizes<Int>(t).begin(), op::sizes<Int>(t).end());
    return r;
  };
  return {like(kNeedsNormX, a.x), like(kNeedsNormWeight, a.weight), like(kNeedsNormBias, a.weight)};
}
template std::array<op::Result<int64_t>, 3> NormBwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 3> NormBwd::results<c10::SymInt>(const Args&);

void NormBwd::run(const Args& a, op::Tensors<3>& out, const quire::Context& context) {
  quire::check(a.dy.sizes() == a.x.sizes(), "norm_bwd: dy must have the sizes of x, ", a.x.sizes(), ", got ",
               a.dy.sizes());
  const MatrixView x(a.x, "norm_bwd: x"), dy(a.dy, "norm_bwd: dy");
  const std::optional<MatrixView> gamma(std::in_place, a.weight, "norm_bwd: weight");
  const int64_t rows = x.matrix().rows;
  quire::norm_grad(
      {.kind = a.normalization.kind,
       .dy = dy.matrix(),
       .x = x.matrix(),
       .gamma = vector(gamma),
       .zero_centered = a.zero_centered,
       .mean = a.normalization.kind == quire::NormKind::layer ? kept_moments(a.mean, rows, "mean") : nullptr,
       .rstd = kept_moments(a.rstd, rows, "rstd"),
       .dx = a.needs & kNeedsNormX ? mutable_matrix(out[0]) : quire::MutableMatrix{},
       .dgamma = a.needs & kNeedsNormWeight ? out[1].mutable_data_ptr() : nullptr,
       .dbeta = a.needs & kNeedsNormBias ? out[2].mutable_data_ptr() : nullptr},
      context);
}

op::Tensors<7> Norm::inference(const Args& a) {
  auto r = op::call<NormFwd>(a);
  return with_carrier(a.out(), r.data(), a.x.sym_sizes());
}

std::pair<op::Tensors<7>, Norm::Saved> Norm::forward(const Args& a, op::Needs) {
  auto r = op::call<NormFwd>(a);
  Saved saved{.x = a.x,
              .weight = a.weight,
              .mean = r[7],
              .rstd = r[8],
              .normalization = a.normalization,
              .zero_centered = a.zero_centered};
  return {with_carrier(a.out(), r.data(), a.x.sym_sizes()), std::move(saved)};
}

op::Tensors<4> Norm::backward(const Saved& s, const op::Tensors<7>& grads, op::Needs need) {
  const int64_t needs = (need[0] ? kNeedsNormX : 0) | (need[1] ? kNeedsNormWeight : 0) | (need[2] ? kNeedsNormBias : 0);
  auto g = op::call<NormBwd>({.dy = grads[0],
                              .x = s.x,
                              .weight = s.weight,
                              .mean = s.mean,
                              .rstd = s.rstd,
                              .normalization = s.normalization,
                              .zero_centered = s.zero_centered,
                              .needs = needs});
  return {g[0], g[1], g[2], {}};
}

// Activations

template <class Int>
quire::Shape<Int> ActivationArgs::sizes() const {
  auto s = shape<Int>(x);
  s.back() = s.back() / Int(activation->inputs());
  return s;
}

namespace {

template <class Int>
void give_group_sizes(const ActivationArgs& a, std::array<op::Result<Int>, 7>& r) {
  const int64_t groups = group_count(*a.offsets, a.x, "activation");
  const auto sizes = a.sizes<Int>();
  const quire::GroupSizes<Int> all{quire::product(sizes, 0, sizes.size() - 1), sizes.back(), groups};
  const quire::QuantSpec spec = a.spec->value_or(quire::QuantSpec{});
  const auto rows = grouped_results(spec, all, quire::Direction::rowwise, a.rowwise);
  const auto columns = grouped_results(spec, all, quire::Direction::columnwise, a.columnwise);
  std::copy(rows.begin(), rows.end(), r.begin() + 1);
  std::copy(columns.begin(), columns.end(), r.begin() + 4);
}

void activate_groups(const ActivationArgs& a, op::Tensors<7>& out, const quire::Context& context) {
  const MatrixView x(a.x, "activation: x");
  const int64_t rows = x.matrix().rows, cols = a.sizes<int64_t>().back();
  const GroupsView groups(*a.offsets, rows, "activation");
  clear_carrier(a.out(), out[0]);
  const quire::QuantSpec spec = a.spec->value_or(quire::QuantSpec{});
  const auto side_of = [&](size_t first, quire::Direction direction, bool wanted) {
    return wanted ? flat_side(std::span(out).subspan(first, 3), spec, direction, "activation") : FlatBuffers{};
  };
  const FlatBuffers rowwise = side_of(1, quire::Direction::rowwise, a.rowwise),
                    columnwise = side_of(4, quire::Direction::columnwise, a.columnwise);
  void* y = a.out().has_y() ? out[0].mutable_data_ptr() : nullptr;
  quire::activation({.activation = *a.activation,
                     .x = x.matrix(),
                     .out = {.y = {y, dtype(a.dtype, "activation: dtype"), rows, cols, cols},
                             .spec = spec,
                             .rowwise = rowwise.side,
                             .columnwise = columnwise.side,
                             .scale = group_scales(a.scale, 1, groups.count(), 0, "activation: scale")},
                     .groups = groups,
                     .room = {.rowwise = rowwise.room, .columnwise = columnwise.room}},
                    context);
}

}  // namespace

template <class Int>
std::array<op::Result<Int>, 7> ActivationFwd::results(const Args& a) {
  check_input(a.x, "activation: x");
  if (a.activation->row().gated)
    quire::check(op::size<Int>(a.x, -1) % Int(2) == Int(0), "activation: ", a.activation->row().name,
                 " is gated and takes two halves of x's last dimension, which is odd: ", op::size<Int>(a.x, -1));
  auto r = produced_results(a.out(), a.sizes<Int>(), "activation");
  if (a.offsets) give_group_sizes<Int>(a, r);
  return r;
}
template std::array<op::Result<int64_t>, 7> ActivationFwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 7> ActivationFwd::results<c10::SymInt>(const Args&);

void ActivationFwd::run(const Args& a, op::Tensors<7>& out, const quire::Context& context) {
  if (a.offsets) return activate_groups(a, out, context);
  const MatrixView x(a.x, "activation: x");
  const int64_t cols = a.sizes<int64_t>().back();
  quire::activation({.activation = *a.activation,
                     .x = x.matrix(),
                     .out = destination(a.out(), out.data(), x.matrix().rows, cols, "activation")},
                    context);
}

template <class Int>
std::array<op::Result<Int>, 1> ActivationBwd::results(const Args& a) {
  check_input(a.dy, "activation_bwd: dy");
  check_input(a.x, "activation_bwd: x");
  op::Result<Int> r{{}, a.x.scalar_type()};
  r.sizes.append(op::sizes<Int>(a.x).begin(), op::sizes<Int>(a.x).end());
  return {r};
}
template std::array<op::Result<int64_t>, 1> ActivationBwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 1> ActivationBwd::results<c10::SymInt>(const Args&);

void ActivationBwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView x(a.x, "activation_bwd: x"), dy(a.dy, "activation_bwd: dy");
  const quire::MutableMatrix dx = mutable_matrix(out[0]);
  const GroupsView groups(a.offsets, x.matrix().rows, "activation_bwd");
  quire::activation_grad({.activation = *a.activation, .dy = dy.matrix(), .x = x.matrix(), .dx = dx, .groups = groups},
                         context);
}

op::Tensors<7> Activation::inference(const Args& a) {
  auto r = op::call<ActivationFwd>(a);
  return with_carrier(a.out(), r.data(), a.sizes<c10::SymInt>());
}

std::pair<op::Tensors<7>, Activation::Saved> Activation::forward(const Args& a, op::Needs) {
  return {inference(a), {.x = a.x, .activation = a.activation, .offsets = a.offsets}};
}

op::Tensors<3> Activation::backward(const Saved& s, const op::Tensors<7>& grads, op::Needs) {
  return {
      op::call<ActivationBwd>({.dy = grads[0], .x = s.x, .activation = s.activation, .offsets = s.offsets})[0], {}, {}};
}

}  // namespace quire_torch
