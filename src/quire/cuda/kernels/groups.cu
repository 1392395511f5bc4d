// Groups: reads their ends, which the host never does, and finds where their rows and buffers lie.
#include "quire/cuda/kernels/fault.cuh"
#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/threads.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Whether the ends obey RowGroups; reports the first that does not.
__device__ bool obey(const PlaceJob& job) {
  int64_t begin = 0;
  for (int64_t e = 0; e < job.groups.count; ++e) {
    const int64_t end = end_of(job.groups, e, job.rows);
    if (begin > end || end > job.rows) {
      report(job.ends, ValueRule::group_end, {.index = e, .value = end, .limit = job.rows, .more = {begin}});
      return false;
    }
    begin = end;
  }
  return true;
}

/// Whether the buffers have room for what all groups store.
__device__ bool fit(const PlaceJob& job, const GroupPlace& all) {
  for (int i = 0; i < 3; ++i) {
    if (job.room[i] >= all.at[i]) continue;
    report(job.buffers[i], ValueRule::group_room,
           {.index = i, .value = job.room[i], .limit = all.at[i], .more = {job.groups.count, all.begin, job.cols}});
    return false;
  }
  return true;
}

}  // namespace

extern "C" {

/// One thread: each group begins where the one before it ends.
__global__ void place_groups(const __grid_constant__ PlaceJob job) {
  bool sound = obey(job);
  GroupPlace next;
  for (int64_t e = 0; sound && e < job.groups.count; ++e) {
    next.rows = end_of(job.groups, e, job.rows) - next.begin;
    job.places[e] = next;
    next.begin += next.rows;
    for (int i = 0; i < 3; ++i) next.at[i] += job.counts[i](next.rows);
  }
  next.rows = 0;
  sound = sound && fit(job, next);
  job.places[job.groups.count] = next;
  for (int64_t e = 0; !sound && e <= job.groups.count; ++e) job.places[e] = {};
}

/// A thread for each element.
__global__ void zero_beyond(const __grid_constant__ BeyondJob job) {
  const int64_t first = job.groups[job.groups.count].begin, width = size_of(job.m.dtype);
  each_of((job.m.rows - first) * job.m.cols, [&](int64_t i) {
    const int64_t at = (first + i / job.m.cols) * job.m.row_stride + i % job.m.cols;
    auto* const to = static_cast<unsigned char*>(job.m.data) + at * width;
    for (int64_t byte = 0; byte < width; ++byte) to[byte] = 0;
  });
}

__global__ void zero_rest(const __grid_constant__ RestJob job) {
  const int64_t first = job.groups[job.groups.count].at[0];
  each_of(job.room - first, [&](int64_t i) { job.data[first + i] = 0; });
}

__global__ void copy_list(const __grid_constant__ ListJob job) {
  each_of(job.count, [&](int64_t i) { job.to[i] = job.bytes[i]; });
}

}  // extern "C"
