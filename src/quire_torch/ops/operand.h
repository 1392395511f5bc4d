// An operand of a Linear's products: a tensor quantized now, or buffers that were quantized before.
#pragma once

#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/tensor.h"
#include "quire_torch/op/fields.h"

namespace quire_torch {

/// How to quantize one role's tensor.
struct QuantizeRole {
  const char* what;  ///< "op: argument", for errors
  const char* role;  ///< "x", "w" or "dy"
  quire::QuantSpec spec{};
  bool rowwise = false, columnwise = false;
  quire::Randomness random{};
  const std::optional<at::Tensor>* scale = nullptr;
};

/// The columnwise buffers of an operand that is kept for another product. Scales are one-dimensional: of a result
/// [ceil(M / 32), K] tracing would ask whether its first size is 1, and make a graph of its own for at most 32 tokens.
template <class Int>
std::array<op::Result<Int>, 3> kept(const quire::QuantSpec& spec, const quire::Shape<Int>& shape, bool wanted) {
  auto r = results(spec, shape, quire::Direction::columnwise, wanted);
  if (wanted)
    r[1].sizes = {quire::product(quire::Shape<Int>(r[1].sizes.begin(), r[1].sizes.end()), 0, r[1].sizes.size())};
  return r;
}

/// Quantizes t. Buffers of a wanted direction that are not defined in `into` are allocated; the others are written.
BufferTensors quantize_operand(const at::Tensor& t, const QuantizeRole& q, const quire::Context& context,
                               BufferTensors into = {});

/// The given buffers, checked against spec and shape for the wanted directions.
BufferTensors given_operand(const op::OptionalTensorList& buffers, const quire::Shape<int64_t>& shape,
                            const QuantizeRole& q);

/// Throws unless the three columnwise buffers hold what an operand of `shape` stores: a backward on foreign buffers
/// must not read past them. Their shapes may differ (linear_fwd flattens some), their memory may not.
void check_saved(const BufferTensors& b, const quire::QuantSpec& spec, const quire::Shape<int64_t>& shape,
                 const char* what);

/// One direction of a quantized [rows, cols] tensor as an operand of a product.
quire::Operand operand(const BufferTensors& b, const quire::QuantSpec& spec, quire::Direction direction, int64_t rows,
                       int64_t cols);

}  // namespace quire_torch
