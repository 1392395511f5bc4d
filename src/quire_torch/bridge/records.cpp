#include "quire_torch/bridge/records.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "quire/base/check.h"
#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/copies.h"

namespace quire_torch {
namespace {

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

}  // namespace

bool recording() { return records().on.load(std::memory_order_relaxed); }

void record_quantized(const char* role, const quire::QuantizeProblem& p, const quire::Context& context) {
  Record record{role, quire::text(p.spec.to_string(), " ", p.x.rows, ",", p.x.cols), {}, {}};
  record.codes = {p.rowwise.data, p.columnwise.data};
  size_t next = 0;
  for (const auto direction : {quire::Direction::rowwise, quire::Direction::columnwise})
    for (at::Tensor& copy : copy_side(p, direction, context, device_of(context)))
      record.buffers[next++] = std::move(copy);
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
