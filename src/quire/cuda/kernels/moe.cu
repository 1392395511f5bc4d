// The order of rows. Nothing is counted in an order that depends on threads.
#include "quire/cuda/kernels/moe.h"

#include "quire/cuda/kernels/fault.cuh"
#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/threads.cuh"
#include "quire/spec/row_map.h"

using namespace quire;
using namespace quire::cuda;

namespace {

__device__ int64_t experts_of(const RankJob& job) { return job.most ? *job.most : job.experts; }

/// Calls each(i, id, rank) for the places of a chunk: the rank is what `counts` has for its expert, plus its places in
/// the chunk before this one. Afterwards `counts` has those of the chunk too. Ids that break the rule are none.
template <class Each>
__device__ void each_rank(const RankJob& job, const ChunkCounts& of, int64_t chunk, const Each& each) {
  const int64_t experts = experts_of(job), begin = chunk * of.chunk;
  const int64_t end = begin + of.chunk < job.count ? begin + of.chunk : job.count;
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t i = first + lane();
    int32_t id = i < end ? job.ids[i] : -1;
    if (id < 0 || id >= experts) id = -1;
    const unsigned same = __match_any_sync(kAllLanes, id), before_me = (1u << lane()) - 1;
    int64_t* const count = of.counts + id * of.chunks + chunk;
    const int64_t before = id < 0 ? 0 : *count;
    __syncwarp();
    if (id >= 0 && (same & before_me) == 0) *count = before + __popc(same);
    __syncwarp();
    if (i < end) each(i, id, before + __popc(same & before_me));
  }
}

__device__ void count_chunk(const RankJob& job, const ChunkCounts& of, int64_t chunk) {
  const int64_t experts = experts_of(job);
  each_rank(job, of, chunk, [&](int64_t i, int32_t, int64_t) {
    const int32_t id = job.ids[i];
    if (!is_number_or_none(id, experts))
      report(job.site, ValueRule::expert_id, {.index = i, .value = id, .limit = experts});
  });
}

__device__ void place_chunk(const RankJob& job, const ChunkCounts& of, const int64_t* starts, int64_t chunk) {
  each_rank(job, of, chunk, [&](int64_t i, int32_t id, int64_t rank) {
    if (job.row_map) job.row_map[i] = id < 0 ? -1 : static_cast<int32_t>(starts[id] + rank);
    if (job.kept) job.kept[i] = rank < job.capacity ? id : -1;
  });
}

/// For all threads of a block: from the places of each expert to those of all experts before it.
__device__ void start_experts_of(const RankJob& job, int64_t* starts) {
  const int64_t experts = experts_of(job), length = ceil_div(experts, blockDim.x), begin = threadIdx.x * length;
  const int64_t end = begin + length < experts ? begin + length : experts;
  int64_t mine = 0;
  for (int64_t e = begin; e < end; ++e) mine += starts[e];
  int64_t start = SumInBlock(mine).before;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t places = starts[e];
    starts[e] = start;
    start += places;
    if (job.offsets) job.offsets[e] = static_cast<int32_t>(start);
  }
}

}  // namespace

extern "C" {

__global__ void find_most(const __grid_constant__ RankJob job) {
  each_of(job.count, [&](int64_t i) {
    const int64_t id = job.ids[i];
    if (id >= 0) atomicMax(job.most, static_cast<uint32_t>(id < kMostExperts ? id + 1 : kMostExperts));
  });
}

__global__ void count_places(const __grid_constant__ RankJob job) {
  each_of_warps(job.of_chunks.chunks, [&](int64_t chunk) { count_chunk(job, job.of_chunks, chunk); });
}

/// A warp for each expert: from the counts of chunks to those of all chunks before.
__global__ void sum_chunks(const __grid_constant__ RankJob job) {
  const int64_t chunks = job.of_chunks.chunks;
  each_of_warps(experts_of(job), [&](int64_t expert) {
    int64_t* const counts = job.of_chunks.counts + expert * chunks;
    int64_t before = 0;
    for (int64_t first = 0; first < chunks; first += kWarp) {
      const int64_t chunk = first + lane(), mine = chunk < chunks ? counts[chunk] : 0;
      const int64_t sum = sum_in_warp(mine);
      if (chunk < chunks) counts[chunk] = before + sum - mine;
      before += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (job.starts && lane() == 0) job.starts[expert] = before;
  });
}

/// One block.
__global__ void start_experts(const __grid_constant__ RankJob job) { start_experts_of(job, job.starts); }

__global__ void place_rows(const __grid_constant__ RankJob job) {
  each_of_warps(job.of_chunks.chunks, [&](int64_t chunk) { place_chunk(job, job.of_chunks, job.starts, chunk); });
}

/// One block does it all, in shared memory.
__global__ void rank_in_block(const __grid_constant__ RankJob job) {
  extern __shared__ int64_t shared[];
  const ChunkCounts of{.chunk = job.of_chunks.chunk, .chunks = job.of_chunks.chunks, .counts = shared};
  int64_t* const starts = shared + job.experts * of.chunks;
  each_of(job.experts * of.chunks, [&](int64_t i) { of.counts[i] = 0; });
  __syncthreads();
  each_of_warps(of.chunks, [&](int64_t chunk) { count_chunk(job, of, chunk); });
  __syncthreads();
  each_of(job.experts, [&](int64_t expert) {
    int64_t before = 0;
    for (int64_t chunk = 0; chunk < of.chunks; ++chunk) {
      int64_t& count = of.counts[expert * of.chunks + chunk];
      const int64_t mine = count;
      count = before;
      before += mine;
    }
    starts[expert] = before;
  });
  __syncthreads();
  start_experts_of(job, starts);
  __syncthreads();
  each_of_warps(of.chunks, [&](int64_t chunk) { place_chunk(job, of, starts, chunk); });
}

/// One block. Each thread has consecutive chunks, and later consecutive places of the order.
__global__ void start_chunks(const __grid_constant__ ChunkJob job) {
  __shared__ unsigned long long first_broken;
  __shared__ unsigned out_of_order;
  const ChunkRowsProblem& p = job.problem;
  const int64_t count = p.sizes.count, length = ceil_div(count, blockDim.x), begin = threadIdx.x * length;
  const int64_t end = begin + length < count ? begin + length : count;
  if (threadIdx.x == 0) first_broken = count, out_of_order = 0, job.starts[count] = -1;
  // What breaks the rule of sizes counts as a size that does not overflow.
  const auto size_of_chunk = [&](int64_t chunk) {
    const int64_t size = at(p.sizes, chunk);
    return size < 0 ? 0 : size > p.rows ? p.rows : size;
  };
  int64_t mine = 0;
  for (int64_t c = begin; c < end; ++c) mine += size_of_chunk(c);
  const SumInBlock sizes(mine);
  int64_t row = sizes.before;
  for (int64_t c = begin; c < end; ++c) {
    const int64_t size = at(p.sizes, c);
    if (size < 0 || size > p.rows - row) atomicMin(&first_broken, static_cast<unsigned long long>(c));
    job.begins[c] = row;
    row += size_of_chunk(c);
  }
  const auto chunk_at = [&](int64_t place) { return p.order.count ? at(p.order, place) : place; };
  for (int64_t i = begin; i < end; ++i) {
    const int64_t chunk = chunk_at(i);
    if (chunk < 0 || chunk >= count || atomicExch(&job.seen[chunk], 1u) != 0) atomicOr(&out_of_order, 1u);
  }
  __syncthreads();
  if (const auto c = static_cast<int64_t>(first_broken); c < count) {
    if (c >= begin && c < end)
      report(job.site, ValueRule::chunk_size,
             {.index = c, .value = at(p.sizes, c), .limit = p.rows, .more = {job.begins[c]}});
    return;
  }
  if (out_of_order != 0) {
    if (threadIdx.x == 0) report(job.site, ValueRule::chunk_order, {.limit = count});
    return;
  }
  mine = 0;
  for (int64_t i = begin; i < end; ++i) mine += padded(size_of_chunk(chunk_at(i)), p.align);
  const SumInBlock aligned(mine);
  int64_t start = aligned.before;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t chunk = chunk_at(i);
    job.starts[chunk] = start;
    start += padded(size_of_chunk(chunk), p.align);
  }
  if (threadIdx.x != 0) return;
  if (aligned.all + p.rows - sizes.all > kMostRows)
    report(job.site, ValueRule::chunk_rows, {.value = aligned.all, .limit = kMostRows, .more = {p.align}});
  else
    job.begins[count] = sizes.all, job.starts[count] = aligned.all;
}

__global__ void map_chunks(const __grid_constant__ ChunkJob job) {
  const int64_t count = job.problem.sizes.count;
  each_of(job.problem.rows, [&](int64_t row) {
    if (job.starts[count] < 0) {
      job.problem.row_map[row] = -1;
      return;
    }
    // The last chunk that begins at the row or before it. Those without rows begin where the next one does.
    int64_t chunk = 0;
    for (int64_t end = count + 1; chunk + 1 < end;) {
      const int64_t middle = chunk + (end - chunk) / 2;
      (job.begins[middle] <= row ? chunk : end) = middle;
    }
    job.problem.row_map[row] = static_cast<int32_t>(job.starts[chunk] + row - job.begins[chunk]);
  });
}

}  // extern "C"
