#include "quire/runner/call_memory.h"

#include "quire/device/device.h"
#include "quire/runner/storage.h"

namespace quire {

int64_t CallMemory::plan(int64_t bytes) {
  const int64_t begin = bytes_;
  bytes_ = plus(bytes_, round_up(bytes, kAlignment));
  return begin;
}

void CallMemory::lend(const Context& context) {
  if (bytes_ <= std::ssize(few_) && on_host(context)) {
    memory_ = few_.data();
  } else if (context.workspace) {
    memory_ = static_cast<std::byte*>(context.workspace->allocate(bytes_));
  } else {
    own_ = host_storage().allocate(bytes_);
    memory_ = static_cast<std::byte*>(own_.get());
  }
}

std::array<int64_t, 3> bytes_of(const QuantSpec& spec, const BufferCounts<int64_t>& counts) {
  const int64_t scale = spec.row().scale == ScaleKind::f32 ? 4 : 1;
  return {counts[0], times(counts[1], scale), times(counts[2], int64_t{4})};
}

PlannedCodes::PlannedCodes(CallMemory& memory, const QuantSpec& spec, const std::array<int64_t, 2>& sizes,
                           int64_t groups)
    : room_(groups == 0 ? counts(buffers<int64_t>(spec, {sizes[0], sizes[1]}, Direction::rowwise))
                        : grouped_counts<int64_t>(spec, {sizes[0], sizes[1], groups}, Direction::rowwise)) {
  const std::array bytes = bytes_of(spec, room_);
  for (size_t i = 0; i < bytes.size(); ++i) places_[i] = memory.plan(bytes[i]);
}

RowCodes PlannedCodes::in(const CallMemory& memory, const RowGroups& groups) const {
  const Side side{memory.at<void>(places_[0]), memory.at<void>(places_[1]), memory.at<float>(places_[2])};
  return {side, room_, groups};
}

}  // namespace quire
