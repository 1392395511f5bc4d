// An operand of a Linear's products: a tensor quantized now, or buffers that were quantized before.
#pragma once

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

/// Quantizes t. Buffers of a wanted direction that are not defined in `into` are allocated; the others are written.
BufferTensors quantize_operand(const at::Tensor& t, const QuantizeRole& q, BufferTensors into = {});

/// The given buffers, checked against spec and t's shape for the wanted directions.
BufferTensors given_operand(const op::OptionalTensorList& buffers, const at::Tensor& t, const QuantizeRole& q);

/// One direction of a quantized [rows, cols] tensor as an operand of a product.
quire::Operand operand(const BufferTensors& b, const quire::QuantSpec& spec, quire::Direction direction, int64_t rows,
                       int64_t cols);

}  // namespace quire_torch
