// Buffers of a quantized tensor that a caller gives, or that a forward operator returned, as operands of products.
#pragma once

#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/tensor.h"
#include "quire_torch/op/fields.h"

namespace quire_torch {

/// One direction of a tensor of `shape`.
struct Stored {
  const quire::QuantSpec& spec;
  quire::Direction direction;
  const quire::Shape<int64_t>& shape;
};

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

/// The six given buffers, of which those of one direction are checked, and columnwise ones that are there for a
/// backward pass.
BufferTensors given_buffers(const op::OptionalTensorList& buffers, const Stored& stored, const char* what);

/// Throws unless three buffers hold what is stored: a product of foreign buffers must not read past them. Their shapes
/// may differ (forward operators flatten some), their memory may not.
void check_saved(const std::array<at::Tensor, 3>& three, const Stored& stored, const char* what);

}  // namespace quire_torch
