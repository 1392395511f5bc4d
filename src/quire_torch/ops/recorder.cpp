#include "quire_torch/ops/recorder.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <mutex>

namespace quire_torch {
namespace {

struct Records {
  std::atomic<bool> on{false};
  std::mutex mutex;
  std::vector<at::Tensor> buffers;
  std::string text;
};

Records& records() {
  static Records r;
  return r;
}

}  // namespace

void record_operand(const char* role, const quire::QuantSpec& spec, at::IntArrayRef shape,
                    const BufferTensors& buffers) {
  Records& r = records();
  if (!r.on.load(std::memory_order_relaxed)) return;
  std::string sizes;
  for (const int64_t n : shape) sizes += (sizes.empty() ? "" : ",") + std::to_string(n);
  const std::lock_guard lock(r.mutex);
  r.text += quire::text(role, " ", spec.to_string(), " ", sizes, "\n");
  const quire::Shape<int64_t> logical(shape.begin(), shape.end());
  for (const auto direction : {quire::Direction::rowwise, quire::Direction::columnwise}) {
    const auto expected = results(spec, logical, direction, true);
    for (size_t i = 0; i < 3; ++i) {
      const at::Tensor& t = buffers[quire::first_buffer(direction) + i];
      const bool stored = t.defined() && t.numel() == c10::multiply_integers(quire_torch::sizes(expected[i]));
      // Operators return some scales flat.
      r.buffers.push_back(!t.defined() ? at::empty({0}, at::kByte)
                          : stored     ? t.view(quire_torch::sizes(expected[i])).clone()
                                       : t.clone());
    }
  }
}

void set_recording(bool on) {
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  if (on) {
    r.buffers.clear();
    r.text.clear();
  }
  r.on = on;
}

std::vector<at::Tensor> recorded_buffers() {
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  return r.buffers;
}

std::string recorded_text() {
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  return r.text;
}

}  // namespace quire_torch
