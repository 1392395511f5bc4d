#include "quire/cuda/groups.h"

#include <algorithm>
#include <cstring>

namespace quire::cuda {
namespace {

constinit const Kernel kPlaceGroups{"groups", "place_groups"};
constinit const Kernel kZeroBeyond{"groups", "zero_beyond"};
constinit const Kernel kZeroRest{"groups", "zero_rest"};
constinit const Kernel kCopyList{"groups", "copy_list"};

/// Threads for bytes of which there are none more often than not: few enough that finding that out takes no time.
Grid grid_of_zeros(int64_t bytes) {
  constexpr int64_t of_thread = 16, most_blocks = 1024;
  return grid_of(std::min(ceil_div(bytes, of_thread), most_blocks * kBlockThreads));
}

Places place(PlaceJob job, const Context& context) {
  if (is_one(job.groups)) return {.rows = job.rows};
  job.ends = fault_site(context, job.groups.what);
  job.places = lend<GroupPlace>(context, job.groups.count + 1);
  launch(kPlaceGroups, {}, job, context);
  return {job.places, job.groups.count, job.rows};
}

}  // namespace

Places place_groups(const RowGroups& groups, int64_t rows, const Context& context) {
  return place({.groups = groups, .rows = rows}, context);
}

Places place_groups(const RowGroups& groups, int64_t rows, const FlatGroups& flat, const Context& context) {
  PlaceJob job{.groups = groups, .rows = rows, .room = flat.room, .cols = flat.cols};
  job.counts = flat_counts(flat.spec, flat.cols, flat.direction);
  for (size_t i = 0; i < job.buffers.size(); ++i)
    job.buffers[i] =
        fault_site(context, text(flat.what, ": ", kBufferNames[first_buffer(flat.direction) + i], " of ", flat.spec));
  return place(job, context);
}

void zero_beyond(const MutableMatrix& m, const Places& groups, const Context& context) {
  if (!groups.places || !m.data || m.rows == 0 || m.cols == 0) return;
  launch(kZeroBeyond, grid_of_zeros(m.rows * m.cols * size_of(m.dtype)), BeyondJob{m, groups}, context);
}

void zero_rest(void* data, int64_t room, const Places& groups, const Context& context) {
  if (!groups.places || !data || room == 0) return;
  launch(kZeroRest, grid_of_zeros(room), RestJob{static_cast<unsigned char*>(data), room, groups}, context);
}

std::optional<DType> common_dtype(const Matrix& m, std::span<const Matrix> each) {
  if (each.empty()) return m.dtype;
  const bool same = std::ranges::all_of(each, [&](const Matrix& one) { return one.dtype == each[0].dtype; });
  return same ? std::optional(each[0].dtype) : std::nullopt;
}

const void* list_on_device(std::span<const std::byte> list, const Context& context) {
  if (list.empty()) return nullptr;
  auto* const memory = lend<unsigned char>(context, std::ssize(list));
  for (size_t done = 0; done < list.size();) {
    ListJob job{};
    job.count = std::min<int64_t>(ListJob::kBytes, std::ssize(list) - static_cast<int64_t>(done));
    job.to = memory + done;
    std::memcpy(job.bytes.data(), list.data() + done, static_cast<size_t>(job.count));
    launch(kCopyList, grid_of(job.count), job, context);
    done += static_cast<size_t>(job.count);
  }
  return memory;
}

}  // namespace quire::cuda
