#include "quire_debug/debug.h"

#include <vector>

#include "quire/format/codec.h"
#include "quire/format/half.h"
#include "quire/spec/delayed.h"
#include "quire/spec/hadamard.h"
#include "quire/spec/random.h"
#include "quire/spec/swizzle.h"

namespace quire_torch {
namespace {

const quire::FormatRow& element_format(const std::string& name) {
  std::string names;
  for (const quire::FormatRow& f : quire::kFormats) {
    if (!f.is_signed) continue;
    if (f.name == name) return f;
    names += (names.empty() ? "" : ", ") + std::string(f.name);
  }
  quire::fail("debug_cast: unknown element format '", name, "'; use one of ", names);
}

/// x widened to float32, contiguous [M, K].
std::vector<float> widened(const at::Tensor& x, const char* what) {
  const MatrixView view(x, what);
  const quire::Matrix& m = view.matrix();
  std::vector<float> out(static_cast<size_t>(m.rows * m.cols));
  if (out.empty()) return out;  // it may have any number of rows
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.cols; ++j) {
      const int64_t at = i * m.row_stride + j;
      float& v = out[static_cast<size_t>(i * m.cols + j)];
      if (m.dtype == quire::DType::f32)
        v = static_cast<const float*>(m.data)[at];
      else if (m.dtype == quire::DType::f16)
        v = quire::f16_to_f32(static_cast<const uint16_t*>(m.data)[at]);
      else
        v = quire::bf16_to_f32(static_cast<const uint16_t*>(m.data)[at]);
    }
  return out;
}

void check_swizzled(const DebugUnswizzle::Args& a, int64_t rows, int64_t cols) {
  const int64_t bytes = quire::round_up(rows, quire::kSwizzleRows) * quire::round_up(cols, quire::kSwizzleCols);
  quire::check(rows >= 0 && cols >= 0 && a.swizzled.scalar_type() == at::kByte && a.swizzled.numel() == bytes,
               "debug_unswizzle: the layout of [", rows, ", ", cols, "] holds ", bytes, " uint8 values, got ",
               a.swizzled.scalar_type(), " ", a.swizzled.sizes());
}

}  // namespace

void DebugCast::run(const Args& a, op::Tensors<1>& out, const quire::Context&) {
  const quire::FormatRow& f = element_format(a.format);
  const std::vector<float> x = widened(a.x, "debug_cast: x");
  auto* codes = out[0].mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < x.size(); ++i) codes[i] = static_cast<uint8_t>(quire::encode(f, x[i]));
}

void DebugRht::run(const Args& a, op::Tensors<1>& out, const quire::Context&) {
  if (out[0].numel() == 0) return;
  const std::vector<float> x = widened(a.x, "debug_rht: x");
  const int64_t k = out[0].size(0), tokens = out[0].size(1), m = k ? static_cast<int64_t>(x.size()) / k : 0;
  auto* bits = static_cast<uint16_t*>(out[0].mutable_data_ptr());
  for (int64_t j = 0; j < k; ++j)
    for (int64_t first = 0; first < tokens; first += quire::kHadamardSize) {
      float v[quire::kHadamardSize] = {};
      for (int64_t i = 0; i < quire::kHadamardSize && first + i < m; ++i)
        v[i] = x[static_cast<size_t>((first + i) * k + j)];
      quire::hadamard16(v, a.signs);
      for (int64_t i = 0; i < quire::kHadamardSize; ++i) bits[j * tokens + first + i] = quire::f32_to_bf16(v[i]);
    }
}

void DebugSwizzle::run(const Args& a, op::Tensors<1>& out, const quire::Context&) {
  if (out[0].numel() == 0) return;
  const at::Tensor scale = a.scale.contiguous();
  out[0].zero_();
  const auto* from = scale.const_data_ptr<uint8_t>();
  auto* to = out[0].mutable_data_ptr<uint8_t>();
  const int64_t rows = scale.size(0), cols = scale.size(1);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) to[quire::swizzled_offset(i, j, cols)] = from[i * cols + j];
}

void DebugUnswizzle::run(const Args& a, op::Tensors<1>& out, const quire::Context&) {
  const int64_t rows = out[0].size(0), cols = out[0].size(1);
  check_swizzled(a, rows, cols);
  if (out[0].numel() == 0) return;
  const at::Tensor swizzled = a.swizzled.contiguous();
  const auto* from = swizzled.const_data_ptr<uint8_t>();
  auto* to = out[0].mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) to[i * cols + j] = from[quire::swizzled_offset(i, j, cols)];
}

void DebugPhilox::run(const Args& a, op::Tensors<1>& out, const quire::Context&) {
  const at::Tensor blocks = a.blocks.contiguous();
  auto* words = out[0].mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < blocks.numel(); ++i) {
    const auto block = static_cast<uint64_t>(blocks.const_data_ptr<int64_t>()[i]);
    const auto draw = quire::philox(static_cast<uint64_t>(a.seed), static_cast<uint64_t>(a.offset), block);
    for (size_t j = 0; j < 4; ++j) words[i * 4 + static_cast<int64_t>(j)] = draw[j];
  }
}

void DebugDelayedUpdate::run(const Args& a, op::Tensors<2>& out, const quire::Context&) {
  const bool newest = a.algorithm == "most_recent";
  quire::check(newest || a.algorithm == "max", "debug_delayed_update: unknown algorithm '", a.algorithm,
               "'; use 'max' or 'most_recent'");
  const quire::DelayedRule rule{.algorithm = newest ? quire::AmaxAlgorithm::most_recent : quire::AmaxAlgorithm::max,
                                .largest = static_cast<float>(a.maximum),
                                .margin = static_cast<int>(a.margin)};
  out[0].copy_(a.history);
  out[1].copy_(a.scale);
  const at::Tensor amax = a.amax.contiguous();
  auto* history = out[0].mutable_data_ptr<float>();
  auto* scale = out[1].mutable_data_ptr<float>();
  const int64_t slots = out[1].size(0);
  for (int64_t i = 0; i < slots; ++i)
    scale[i] = quire::delayed_update(rule, {.data = history + i, .length = out[0].size(0), .stride = slots},
                                     amax.const_data_ptr<float>()[i], scale[i]);
}

}  // namespace quire_torch
