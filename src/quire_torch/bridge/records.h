// Copies of the operands that products really used, for quire.debug.operands(): a listener of the one stream of events
// (observe.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "quire/base/context.h"
#include "quire/spec/problem.h"

namespace quire_torch {

/// Whether records are being made.
bool recording();
/// Copies what a problem has quantized. role: "" while no product has read it.
void record_quantized(const char* role, const quire::QuantizeProblem& p, const quire::Context& context);
/// Gives a record without a role the one that a product has for these codes.
void record_read(const char* role, const void* codes);

/// Begins (dropping earlier records), or ends (keeping them). For the whole process. Returns whether that changed
/// anything.
bool set_recording(bool on);
/// The buffers of the records that have a role, six each; absent ones are of size [0].
std::vector<at::Tensor> recorded_buffers();
/// A line for each of them: "ROLE SPEC M,K".
std::string recorded_text();

}  // namespace quire_torch
