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
  for (const at::Tensor& t : buffers) r.buffers.push_back(t.defined() ? t.clone() : at::empty({0}, at::kByte));
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
