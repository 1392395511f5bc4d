// Observes the quantized operands that products really used, for quire.debug.operands(). Off unless asked for.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "quire_torch/bridge/tensor.h"

namespace quire_torch {

/// Copies the buffers of one operand if recording is on.
void record_operand(const char* role, const quire::QuantSpec& spec, at::IntArrayRef shape,
                    const BufferTensors& buffers);

/// Turns recording on (dropping earlier records) or off (keeping them). For the whole process.
void set_recording(bool on);

/// All recorded buffers, six a record; absent ones are of size [0].
std::vector<at::Tensor> recorded_buffers();
/// A line a record: "role spec d0,d1,...".
std::string recorded_text();

}  // namespace quire_torch
