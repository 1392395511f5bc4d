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

/// Threads that share work.
struct Team {
  int64_t mine, count;

  template <class Each>
  __device__ void each_of(int64_t work, const Each& each) const {
    for (int64_t i = mine; i < work; i += count) each(i);
  }
};

/// 16 bytes at a time between the ends.
__device__ void zero(unsigned char* to, int64_t bytes, const Team& team) {
  const int64_t before = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % sizeof(uint4));
  const int64_t head = before < bytes ? before : bytes, words = (bytes - head) / static_cast<int64_t>(sizeof(uint4));
  const int64_t done = head + words * static_cast<int64_t>(sizeof(uint4));
  team.each_of(head, [&](int64_t i) { to[i] = 0; });
  team.each_of(words, [&](int64_t i) { reinterpret_cast<uint4*>(to + head)[i] = {}; });
  team.each_of(bytes - done, [&](int64_t i) { to[done + i] = 0; });
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

/// Rows that lie one after another are one run of bytes; of others each has a block of threads.
__global__ void zero_beyond(const __grid_constant__ BeyondJob job) {
  const int64_t first = job.groups[job.groups.count].begin, rows = job.m.rows - first, width = size_of(job.m.dtype);
  const int64_t bytes = job.m.cols * width, stride = job.m.row_stride * width;
  auto* const begin = static_cast<unsigned char*>(job.m.data) + first * stride;
  if (stride == bytes) return zero(begin, rows * bytes, {thread(), threads()});
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    zero(begin + row * stride, bytes, {threadIdx.x, blockDim.x});
}

__global__ void zero_rest(const __grid_constant__ RestJob job) {
  const int64_t first = job.groups[job.groups.count].at[0];
  zero(job.data + first, job.room - first, {thread(), threads()});
}

__global__ void copy_list(const __grid_constant__ ListJob job) {
  each_of(job.count, [&](int64_t i) { job.to[i] = job.bytes[i]; });
}

}  // extern "C"
