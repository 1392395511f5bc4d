#include "quire_torch/ops/permute.h"

#include "quire/operations/operations.h"

namespace quire_torch {
namespace {

/// Whether two sizes are equal. True for symbolic ones of which tracing cannot know; kernels will.
template <class Int>
bool may_equal(const Int& a, const Int& b) {
  if constexpr (std::same_as<Int, c10::SymInt>) {
    return TORCH_GUARD_OR_TRUE(a.sym_eq(b));
  } else {
    return a == b;
  }
}

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

/// Throws unless `t` is a vector of int32 or int64.
void check_numbers(const at::Tensor& t, const char* what) {
  quire::check((t.scalar_type() == at::kInt || t.scalar_type() == at::kLong) && t.dim() == 1, what,
               " must be a vector of int32 or int64, got ", t.scalar_type(), " of ", t.dim(), " dimensions");
}

/// A row map and weights, contiguous for the time of a call.
class MapView {
 public:
  MapView(const at::Tensor& row_map, const op::OptionalTensor& weights)
      : row_map_(row_map.contiguous()), weights_(weights ? weights->contiguous() : at::Tensor()) {}
  quire::RowMap map() const { return {row_map_.const_data_ptr<int32_t>(), row_map_.size(0), row_map_.size(1)}; }
  const float* weights() const { return weights_.defined() ? weights_.const_data_ptr<float>() : nullptr; }

 private:
  at::Tensor row_map_, weights_;
};

}  // namespace

void check_ids(const at::Tensor& t, const char* what, const char* argument) {
  quire::check(t.scalar_type() == at::kInt && t.layout() == at::kStrided, what, argument, " must be dense int32, got ",
               t.scalar_type(), " with layout ", t.layout(), "; convert it with .to(torch.int32)");
}

template <class Int>
std::array<op::Result<Int>, 2> ExpertRows::results(const Args& a) {
  check_ids(a.topk_ids, "permute or tokens_per_expert (expert_rows): topk_ids");
  quire::check(a.topk_ids.dim() == 2,
               "permute or tokens_per_expert (expert_rows): topk_ids must be [tokens, topk], got ",
               op::sizes<Int>(a.topk_ids), "; use .reshape(-1, topk)");
  quire::check(
      a.num_experts >= 0,
      "permute or tokens_per_expert (expert_rows): num_experts must be at least 1, or 0 if it is not known; got ",
      a.num_experts);
  return {op::Result<Int>{{op::size<Int>(a.topk_ids, 0), op::size<Int>(a.topk_ids, 1)}, at::kInt},
          op::Result<Int>{{Int(a.num_experts)}, at::kInt}};
}
template std::array<op::Result<int64_t>, 2> ExpertRows::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 2> ExpertRows::results<c10::SymInt>(const Args&);

op::Tensors<2> ExpertRows::inference(const Args& a) { return op::call<ExpertRows>(a); }

void ExpertRows::run(const Args& a, op::Tensors<2>& out, const quire::Context& context) {
  const at::Tensor ids = a.topk_ids.contiguous();
  quire::expert_rows({.ids = ids.const_data_ptr<int32_t>(),
                      .count = ids.numel(),
                      .row_map = out[0].mutable_data_ptr<int32_t>(),
                      .offsets = a.num_experts > 0 ? out[1].mutable_data_ptr<int32_t>() : nullptr,
                      .num_experts = a.num_experts},
                     context);
}

template <class Int>
std::array<op::Result<Int>, 1> ChunkRows::results(const Args& a) {
  check_numbers(a.sizes, "chunk_rows: sizes");
  if (a.order) {
    check_numbers(*a.order, "chunk_rows: order");
    check_one_device(a.order->device(), a.sizes.device(), "chunk_rows: order and sizes");
  }
  return {op::Result<Int>{{op::as<Int>(a.rows), Int(1)}, at::kInt}};
}
template std::array<op::Result<int64_t>, 1> ChunkRows::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 1> ChunkRows::results<c10::SymInt>(const Args&);

void ChunkRows::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const at::Tensor sizes = a.sizes.contiguous(), order = a.order ? a.order->contiguous() : at::Tensor();
  quire::check(!order.defined() || order.numel() == sizes.numel(), "chunk_rows: order must have one number per chunk, ",
               sizes.numel(), ", got ", order.defined() ? order.numel() : 0);
  quire::chunk_rows({.sizes = integers(sizes),
                     .order = order.defined() ? integers(order) : quire::Integers{},
                     .align = a.align,
                     .row_map = out[0].mutable_data_ptr<int32_t>(),
                     .rows = out[0].numel()},
                    context);
}

template <class Int>
std::array<op::Result<Int>, 1> PermuteFwd::results(const Args& a) {
  check_row_map<Int>("permute", "x", a.x, a.row_map, a.weights);
  check_tokens<Int>(a.x, a.row_map);
  if (dtype(a.x.scalar_type(), "permute: x") == quire::DType::u8)
    quire::check(!a.weights, "permute: x of uint8 has no weights; leave them out, or dequantize x");
  return {op::Result<Int>{{op::as<Int>(a.rows), op::size<Int>(a.x, 1)}, a.x.scalar_type()}};
}
template std::array<op::Result<int64_t>, 1> PermuteFwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 1> PermuteFwd::results<c10::SymInt>(const Args&);

void PermuteFwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView x(a.x, "permute: x");
  const MapView view(a.row_map, a.weights);
  quire::permute({.from = x.matrix(), .map = view.map(), .weights = view.weights(), .to = mutable_matrix(out[0])},
                 context);
}

template <class Int>
std::array<op::Result<Int>, 1> UnpermuteFwd::results(const Args& a) {
  check_input(a.y, "unpermute: y");
  check_row_map<Int>("unpermute", "y", a.y, a.row_map, a.weights);
  return {op::Result<Int>{{op::size<Int>(a.row_map, 0), op::size<Int>(a.y, 1)}, a.y.scalar_type()}};
}
template std::array<op::Result<int64_t>, 1> UnpermuteFwd::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 1> UnpermuteFwd::results<c10::SymInt>(const Args&);

void UnpermuteFwd::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView y(a.y, "unpermute: y");
  const MapView view(a.row_map, a.weights);
  quire::unpermute({.from = y.matrix(), .map = view.map(), .weights = view.weights(), .to = mutable_matrix(out[0])},
                   context);
}

template <class Int>
std::array<op::Result<Int>, 1> UnpermuteDot::results(const Args& a) {
  check_input(a.x, "unpermute_dot: x");
  check_input(a.y, "unpermute_dot: y");
  check_row_map<Int>("unpermute_dot", "y", a.y, a.row_map, {});
  check_tokens<Int>(a.x, a.row_map);
  return {op::Result<Int>{{op::size<Int>(a.row_map, 0), op::size<Int>(a.row_map, 1)}, at::kFloat}};
}
template std::array<op::Result<int64_t>, 1> UnpermuteDot::results<int64_t>(const Args&);
template std::array<op::Result<c10::SymInt>, 1> UnpermuteDot::results<c10::SymInt>(const Args&);

void UnpermuteDot::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  quire::check(a.x.size(1) == a.y.size(1), "unpermute_dot: x and y must have the same columns; got ", a.x.size(1),
               " and ", a.y.size(1));
  const MatrixView x(a.x, "unpermute_dot: x"), y(a.y, "unpermute_dot: y");
  const MapView view(a.row_map, {});
  quire::permuted_dot(
      {.permuted = y.matrix(), .tokens = x.matrix(), .map = view.map(), .to = out[0].mutable_data_ptr<float>()},
      context);
}

op::Tensors<1> Permute::inference(const Args& a) { return op::call<PermuteFwd>(a); }

std::pair<op::Tensors<1>, Permute::Saved> Permute::forward(const Args& a, op::Needs need) {
  Saved saved{.x = {}, .row_map = a.row_map, .weights = a.weights};
  if (need[2]) saved.x = a.x;
  return {inference(a), std::move(saved)};
}

op::Tensors<3> Permute::backward(const Saved& s, const op::Tensors<1>& grads, op::Needs need) {
  op::Tensors<3> out;
  if (need[0]) out[0] = op::call<UnpermuteFwd>({.y = grads[0], .row_map = s.row_map, .weights = s.weights})[0];
  if (need[2]) out[2] = op::call<UnpermuteDot>({.y = grads[0], .row_map = s.row_map, .x = *s.x})[0];
  return out;
}

op::Tensors<1> Unpermute::inference(const Args& a) { return op::call<UnpermuteFwd>(a); }

std::pair<op::Tensors<1>, Unpermute::Saved> Unpermute::forward(const Args& a, op::Needs need) {
  Saved saved{.y = {}, .row_map = a.row_map, .weights = a.weights, .rows = a.y.sym_size(0)};
  if (need[2]) saved.y = a.y;
  return {inference(a), std::move(saved)};
}

op::Tensors<3> Unpermute::backward(const Saved& s, const op::Tensors<1>& grads, op::Needs need) {
  op::Tensors<3> out;
  if (need[0])
    out[0] = op::call<PermuteFwd>({.x = grads[0], .row_map = s.row_map, .weights = s.weights, .rows = s.rows})[0];
  if (need[2]) out[2] = op::call<UnpermuteDot>({.y = *s.y, .row_map = s.row_map, .x = grads[0]})[0];
  return out;
}

}  // namespace quire_torch
