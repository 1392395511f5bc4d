// The results of an operator, described once by Op::results<Int>(args): with Int = int64_t real kernels allocate from
// the description, with Int = c10::SymInt tracing does.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>

#include "quire/base/huge_pages.h"
#include "quire/base/shape.h"
#include "quire_torch/op/device.h"
#include "quire_torch/op/fields.h"

namespace quire_torch::op {

/// How an error ends that refuses a tensor on the meta device, which has no values: moving it is no remedy.
inline constexpr const char* kInsteadOfMeta =
    "; give the one on meta values, by load_state_dict(state_dict, assign=True) or by Module.to_empty(device=...) and "
    "an initialisation, or move the other";

/// A contiguous result tensor.
template <class Int>
struct Result {
  c10::SmallVector<Int, 5> sizes;
  at::ScalarType dtype;
};

/// A result that this call does not produce: an empty tensor of size [0]. (A schema cannot promise `Tensor?` results.)
template <class Int>
Result<Int> absent(at::ScalarType dtype) {
  return {{Int(0)}, dtype};
}

template <class Int>
c10::ArrayRef<Int> sizes(const at::Tensor& t) {
  if constexpr (std::same_as<Int, c10::SymInt>) {
    return t.sym_sizes();
  } else {
    return t.sizes();
  }
}

/// The value of a SymInt argument; throws for int64_t if it is not known.
template <class Int>
Int as(const c10::SymInt& v) {
  if constexpr (std::same_as<Int, c10::SymInt>) {
    return v;
  } else {
    return v.expect_int();
  }
}

template <class Int>
Int size(const at::Tensor& t, int64_t dim) {
  if constexpr (std::same_as<Int, c10::SymInt>) {
    return t.sym_size(dim);
  } else {
    return t.size(dim);
  }
}

template <size_t N>
using Tensors = std::array<at::Tensor, N>;

/// The results of Op, named by `static constexpr std::array kResults{"y", "scale"}` or kNoResults.
template <class Op>
using Results = Tensors<Op::kResults.size()>;
inline constexpr std::array<const char*, 0> kNoResults{};

/// On the CPU what at::empty comes to in the end: results are many and mostly small or absent, and a way through the
/// dispatcher costs more than their memory. Inlined for the same reason.
[[gnu::always_inline]] inline at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions o) {
  const bool host = on_host(o.device());
  at::Tensor t = host ? at::Tensor(at::detail::empty_cpu(sizes, o)) : at::empty(sizes, o);
  const auto bytes = static_cast<int64_t>(t.nbytes());
  if (bytes >= quire::kHugePageBytes && host) quire::ask_for_huge_pages(t.mutable_data_ptr(), bytes);
  return t;
}
inline at::Tensor allocate(c10::SymIntArrayRef sizes, at::TensorOptions o) { return at::empty_symint(sizes, o); }

}  // namespace quire_torch::op
