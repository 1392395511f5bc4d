// What cuBLASLt is asked for a product, apart from its pointers, and the algorithm that it has found.
#pragma once

#include <compare>
#include <optional>

#include "quire/base/context.h"
#include "quire/cuda/cublaslt.h"

namespace quire::cuda {

/// An operand, as columns of `rows` numbers.
struct ProductMatrix {
  lt::Type type = lt::kF32;
  int64_t rows = 0, cols = 0, stride = 0;

  auto operator<=>(const ProductMatrix&) const = default;
};

struct ProductOperand {
  ProductMatrix codes;
  bool transposed = false;
  lt::ScaleMode scales = lt::kScalar;

  auto operator<=>(const ProductOperand&) const = default;
};

/// In cuBLASLt's terms: it computes columns, so that its D is out transposed, its A is our b and its B our a.
struct ProductShape {
  ProductOperand a, b;
  ProductMatrix d;
  std::optional<lt::Type> bias;  ///< one number for each row of D
  bool factors = false;          ///< alpha and beta are memory of the device

  auto operator<=>(const ProductShape&) const = default;
};

/// Where a product's numbers are, and what its sums are multiplied by.
struct ProductMemory {
  const void *a = nullptr, *a_scales = nullptr;
  const void *b = nullptr, *b_scales = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  const void* bias = nullptr;
  const void *alpha = nullptr, *beta = nullptr;
};

/// Alignment in bytes of everything that cuBLASLt is given. The same for all, so that the algorithm, and with it the
/// bits of a result, do not depend on where tensors happen to lie.
inline constexpr uint32_t kProductAlignment = 16;

struct ProductPlan {
  lt::Handle handle = nullptr;
  lt::Algorithm algorithm{};
  size_t workspace = 0;
  int status = lt::kSuccess;  ///< else there is none (cublasStatus_t)
};

/// What cuBLASLt answers for that shape on the context's device. It is asked once for each shape, until kMostPlans of a
/// device have been kept; then these are forgotten. Of the memory it is told which parts there are.
ProductPlan plan_of(const ProductShape& shape, const ProductMemory& memory, const Context& context);
inline constexpr size_t kMostPlans = 1024;

/// Puts the product on the context's stream.
void run_product(const ProductShape& shape, const ProductMemory& memory, const Context& context);

}  // namespace quire::cuda
