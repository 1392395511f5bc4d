#include "quire_torch/ops/recorder.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "quire/base/process_mutex.h"

namespace quire_torch {
namespace {

struct Records {
  std::atomic<bool> on{false};
  quire::ProcessMutex mutex;
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
  std::vector<at::Tensor> copies;
  const quire::Shape<int64_t> logical(shape.begin(), shape.end());
  for (const auto direction : {quire::Direction::rowwise, quire::Direction::columnwise}) {
    const auto expected = results(spec, logical, direction, true);
    for (size_t i = 0; i < 3; ++i) {
      const at::Tensor& t = buffers[quire::first_buffer(direction) + i];
      const bool stored = t.defined() && t.numel() == c10::multiply_integers(quire_torch::sizes(expected[i]));
      // Operators return some scales flat.
      copies.push_back(!t.defined() ? at::empty({0}, at::kByte)
                       : stored     ? t.view(quire_torch::sizes(expected[i])).clone()
                                    : t.clone());
    }
  }
  const std::lock_guard lock(r.mutex);
  r.text += quire::text(role, " ", spec.to_string(), " ", sizes, "\n");
  std::move(copies.begin(), copies.end(), std::back_inserter(r.buffers));
}

void set_recording(bool on) {
  std::vector<at::Tensor> before;  // whose end may be somebody else's code
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  if (on) {
    before.swap(r.buffers);
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
