#include "quire_torch/bridge/records.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/device/device.h"
#include "quire_torch/bridge/tensor.h"

namespace quire_torch {
namespace {

using quire::Direction;

struct Record {
  std::string role, rest;
  std::array<const void*, 2> codes;  ///< where they were, rowwise and columnwise
  std::array<at::Tensor, 6> buffers;
};

struct Records {
  std::atomic<bool> on{false};
  quire::ProcessMutex mutex;
  std::vector<Record> list;
};

Records& records() {
  static constinit quire::Lazy<Records> one;
  return one.get();
}

at::Device device_of(const quire::Context& context) {
  if (context.device == quire::host().device) return at::kCPU;
  return at::Device(quire::text(context.device->name, ":", context.index));
}

/// Copies of the three buffers of a side, in the order of the stream; of size [0] where it is absent.
void copy_side(const quire::QuantizeProblem& p, Direction direction, at::Device device, at::Tensor* to) {
  const quire::Side& side = direction == Direction::rowwise ? p.rowwise : p.columnwise;
  const auto stored = results<int64_t>(p.spec, {p.x.rows, p.x.cols}, direction, side.data != nullptr);
  const std::array<void*, 3> memory{side.data, side.scale, side.amax};
  for (size_t i = 0; i < stored.size(); ++i) {
    const auto options = at::device(device).dtype(stored[i].dtype);
    const bool there = memory[i] && c10::multiply_integers(sizes(stored[i])) > 0;
    to[i] = there ? at::from_blob(memory[i], sizes(stored[i]), options).clone() : at::empty(sizes(stored[i]), options);
  }
}

}  // namespace

bool recording() { return records().on.load(std::memory_order_relaxed); }

void record_quantized(const char* role, const quire::QuantizeProblem& p, const quire::Context& context) {
  Record record{role, quire::text(p.spec.to_string(), " ", p.x.rows, ",", p.x.cols), {}, {}};
  record.codes = {p.rowwise.data, p.columnwise.data};
  copy_side(p, Direction::rowwise, device_of(context), record.buffers.data());
  copy_side(p, Direction::columnwise, device_of(context), record.buffers.data() + 3);
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  r.list.push_back(std::move(record));
}

void record_read(const char* role, const void* codes) {
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  // Memory is used again: the last one is meant.
  for (auto record = r.list.rbegin(); record != r.list.rend(); ++record) {
    if (codes == nullptr || (record->codes[0] != codes && record->codes[1] != codes)) continue;
    if (record->role.empty()) record->role = role;
    return;
  }
}

bool set_recording(bool on) {
  std::vector<Record> before;  // whose end may be somebody else's code
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  if (on) before.swap(r.list);
  return r.on.exchange(on) != on;
}

std::vector<at::Tensor> recorded_buffers() {
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  std::vector<at::Tensor> buffers;
  for (const Record& record : r.list)
    if (!record.role.empty()) buffers.insert(buffers.end(), record.buffers.begin(), record.buffers.end());
  return buffers;
}

std::string recorded_text() {
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  std::string text;
  for (const Record& record : r.list)
    if (!record.role.empty()) text += record.role + " " + record.rest + "\n";
  return text;
}

}  // namespace quire_torch
