#include "quire_torch/ops/wgrad.h"

#include <ATen/ops/add.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "quire/operations/operations.h"
#include "quire_torch/ops/operands.h"

namespace quire_torch {
namespace {

op::TensorList listed(const at::Tensor& t) { return {t}; }
const op::TensorList& listed(const op::TensorList& list) { return list; }

/// Throws unless t is a contiguous float matrix; what: "op: argument".
void check_main_grad(const at::Tensor& t, const char* what) {
  quire::check(t.dim() == 2 && t.is_contiguous() && dtype(t.scalar_type(), what) != quire::DType::u8, what,
               " must be a contiguous float32, float16 or bfloat16 matrix [out_features, in_features], got ",
               t.scalar_type(), " ", t.sizes(), t.is_contiguous() ? "" : " (not contiguous)");
}

/// Throws unless main_grad has something for each group.
void check_count(const op::TensorList& main_grad, int64_t groups, const char* op) {
  const bool stacked = main_grad.size() == 1 && main_grad[0].dim() == 3 && main_grad[0].size(0) == groups;
  quire::check(stacked || static_cast<int64_t>(main_grad.size()) == groups, op,
               ": main_grad must be a matrix for each of the ", groups, " groups, or one tensor for all of them; got ",
               main_grad.size());
}

/// Throws where groups share memory: each would replace, or add to, what another one writes.
void check_apart(const op::TensorList& main_grad, const char* op) {
  std::vector<std::pair<const char*, size_t>> begins;
  for (size_t e = 0; e < main_grad.size(); ++e)
    if (main_grad[e].numel() > 0) begins.emplace_back(static_cast<const char*>(main_grad[e].const_data_ptr()), e);
  std::sort(begins.begin(), begins.end());
  for (size_t i = 1; i < begins.size(); ++i) {
    const auto& [begin, before] = begins[i - 1];
    quire::check(begin + main_grad[before].nbytes() <= begins[i].first, op, ": main_grad of the groups ",
                 std::min(before, begins[i].second), " and ", std::max(before, begins[i].second),
                 " share memory; give each group memory of its own, or, for a weight that groups share, no main_grad, "
                 "and autograd adds the gradients");
  }
}

/// Throws unless accumulate_ can add value to main_grad.
void check_addend(const at::Tensor& main_grad, const at::Tensor& value) {
  check_main_grad(main_grad, "accumulate_: main_grad");
  quire::check(value.sizes() == main_grad.sizes(), "accumulate_: value must have main_grad's shape ", main_grad.sizes(),
               ", got ", value.sizes());
  quire::check(dtype(value.scalar_type(), "accumulate_: value") != quire::DType::u8,
               "accumulate_: value must be float32, float16 or bfloat16, got ", value.scalar_type(),
               "; convert it with .to()");
}

}  // namespace

int64_t most_tokens(const at::Tensor& dy_data, const at::Tensor& x_data) {
  constexpr int64_t kEmpty = int64_t{1} << 31;  // rows without columns have no codes
  return std::max(kEmpty, quire::times<int64_t>(2, std::max(dy_data.numel(), x_data.numel())));
}

template <class Into>
void Wgrad<Into>::run(const Args& a, const quire::Context& context) {
  const op::TensorList dw = listed(a.main_grad.value);
  const int64_t count = group_count(a.offsets, a.dy_data, "wgrad_"), tokens = op::as<int64_t>(a.tokens),
                most = most_tokens(a.dy_data, a.x_data);
  check_count(dw, count, "wgrad_");
  for (int64_t e = 0; e < count; ++e) {
    const at::Tensor one = member(dw, static_cast<size_t>(e), 2);
    check_main_grad(one, "wgrad_: main_grad");
    quire::check(one.sizes() == member(dw, 0, 2).sizes(), "wgrad_: main_grad must have one shape in all groups, ",
                 member(dw, 0, 2).sizes(), "; got ", one.sizes());
  }
  check_apart(dw, "wgrad_");
  quire::check(tokens >= 0 && tokens <= most, "wgrad_: tokens must be the rows of x and dy, from 0 to ", most,
               " for these codes; got ", tokens);
  const GroupsView groups(a.offsets, tokens, "wgrad_");
  const auto columnwise = quire::Direction::columnwise;
  const GivenOperand dy(std::array{a.dy_data, a.dy_scale, a.dy_amax},
                        {a.recipe->dy, columnwise, groups, dw[0].size(-2)}, "wgrad_: dy"),
      x(std::array{a.x_data, a.x_scale, a.x_amax}, {a.recipe->x, columnwise, groups, dw[0].size(-1)}, "wgrad_: x");
  const MutableGroupMatrices out(dw, count);
  const void* first = out.each().empty() ? out.all().data : out.each()[0].data;
  quire::gemm({.a = dy,
               .b = x,
               .out = out.all(),
               .addend = a.overwrite ? nullptr : first,
               .role = quire::kWgrad,
               .outs = out.each()},
              context);
}

template <class Into>
void Accumulate<Into>::run(const Args& a, const quire::Context&) {
  const op::TensorList main_grad = listed(a.main_grad.value);
  quire::check(a.value.dim() == 2 || a.value.dim() == 3, "accumulate_: value must be [N, K] or [groups, N, K], got ",
               a.value.sizes());
  const at::Tensor values = a.value.dim() == 2 ? a.value.unsqueeze(0) : a.value;
  check_count(main_grad, values.size(0), "accumulate_");
  check_apart(main_grad, "accumulate_");
  const auto part = [&](int64_t e) { return member(main_grad, static_cast<size_t>(e), 2); };
  for (int64_t e = 0; e < values.size(0); ++e) check_addend(part(e), values.select(0, e));
  for (int64_t e = 0; e < values.size(0); ++e) {
    const at::Tensor to = part(e), value = values.select(0, e);
    if (a.overwrite) {
      to.copy_(value);
    } else {
      to.copy_(at::add(to.to(at::kFloat), value));
    }
  }
}

template struct Wgrad<at::Tensor>;
template struct Wgrad<op::TensorList>;
template struct Accumulate<at::Tensor>;
template struct Accumulate<op::TensorList>;

}  // namespace quire_torch
