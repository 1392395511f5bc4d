// The state of modules. Only integers are added by threads in any order.
#include "quire/cuda/kernels/state.h"

#include "quire/cuda/kernels/fault.cuh"
#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/threads.cuh"
#include "quire/spec/delayed_step.h"
#include "quire/spec/fingerprint_rule.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Calls each(group, its matrix) for the groups of this block that are wanted.
template <class Each>
__device__ void each_wanted(const FingerprintJob& job, const Each& each) {
  each_group(job.groups, [&](int64_t e, const GroupPlace& place) {
    if (!job.only.places || job.only[e].rows > 0) each(e, group_matrix(job.x, job.each, e, place));
  });
}

/// The 8 bytes at `from`, or the `bytes` that are left of a row, as one number.
__device__ uint64_t word_at(const std::byte* from, int64_t bytes) {
  if (bytes >= 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0) return *reinterpret_cast<const uint64_t*>(from);
  uint64_t word = 0;
  for (int64_t i = 0; i < 8 && i < bytes; ++i) word |= static_cast<uint64_t>(from[i]) << (8 * i);
  return word;
}

/// The greatest amax of all lanes, in each of them.
__device__ float maximum_in_warp(float amax) {
  for (int by = 1; by < kWarp; by *= 2) amax = maximum_of(amax, __shfl_xor_sync(kAllLanes, amax, by));
  return amax;
}

/// The amax of a finished step and of the history from row 1 on, which rolls: each row goes to the one before it, and
/// what is in row 1 is gone. A lane reads `kRows` rows before any lane writes.
__device__ float rolled(const AmaxHistory& history, float last) {
  constexpr int kRows = 32;
  float amax = last;
  for (int64_t begin = 1 + lane(); begin - lane() < history.length; begin += kRows * kWarp) {
    float rows[kRows];
    QUIRE_UNROLL
    for (int k = 0; k < kRows; ++k) {
      const int64_t i = begin + k * kWarp;
      rows[k] = i < history.length ? history[i] : last;
    }
    __syncwarp();
    QUIRE_UNROLL
    for (int k = 0; k < kRows; ++k) {
      const int64_t i = begin + k * kWarp;
      amax = maximum_of(amax, rows[k]);
      if (i > 1 && i < history.length) history[i - 1] = rows[k];
    }
  }
  return maximum_in_warp(amax);
}

/// end_step() by a warp. A maximum has the same bits in every order, but for zeros of two signs, which give no scale.
__device__ void end_step_by_warp(const DelayedState& s, const double* row, bool backward, int64_t in_use,
                                 int64_t slot) {
  const AmaxHistory history = history_of(s, row, slot);
  for (int64_t i = history.length + lane(); i < in_use && i < s.rows; i += kWarp) history[i] = 0;
  const float row_0 = s.amax[slot], last = finished_amax(s.reduced[slot], row_0);
  if (last == 0) {
    if (lane() == 0) history[0] = row_0;
    return;
  }
  const DelayedRule rule = rule_of(row, backward);
  const float greatest = rolled(history, last), amax = rule.algorithm == AmaxAlgorithm::max ? greatest : last;
  if (lane() != 0) return;
  history[history.length - 1] = last;
  history[0] = 0, s.amax[slot] = 0;
  s.scale[slot] = next_scale(rule, amax, s.scale[slot]);
}

}  // namespace

extern "C" {

__global__ void sum_words(const __grid_constant__ FingerprintJob job) {
  each_wanted(job, [&](int64_t e, const Matrix& x) {
    const int64_t width = size_of(x.dtype), bytes = x.cols * width, words = ceil_div(bytes, 8);
    const auto* const data = static_cast<const std::byte*>(x.data);
    // Rows that lie one after another are one.
    const bool one_row = x.row_stride == x.cols && bytes % 8 == 0;
    uint64_t sum = 0;
    each_of(x.rows * words, [&](int64_t i) {
      const int64_t row = one_row ? 0 : i / words, word = i - row * words;
      const int64_t left = one_row ? 8 : bytes - word * 8;
      sum += mixed(word_at(data + row * x.row_stride * width + word * 8, left), static_cast<uint64_t>(i));
    });
    sum = static_cast<uint64_t>(sum_in_warp(static_cast<int64_t>(sum)));
    if (lane() == kWarp - 1 && sum != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&job.sums[e]), static_cast<unsigned long long>(sum));
  });
}

__global__ void end_fingerprints(const __grid_constant__ FingerprintJob job) {
  each_of(job.groups.count, [&](int64_t e) {
    if (job.only.places && job.only[e].rows == 0) return;
    const auto found = static_cast<int64_t>(fingerprint_of(job.sums[e], job.groups[e].rows, job.x.cols));
    if (job.to) job.to[e] = found;
    if (job.expected && job.expected[e] != found) report(job.site, ValueRule::stale_codes, {});
  });
}

__global__ void advance(const __grid_constant__ AdvanceProblem p) {
  if (thread() == 0) *p.value = static_cast<int64_t>(static_cast<uint64_t>(*p.value) + 1);
}

__global__ void maximum(const __grid_constant__ MaximumProblem p) {
  each_of(p.count, [&](int64_t i) { p.to[i] = maximum_of(p.to[i], p.values[i]); });
}

__global__ void collect(const __grid_constant__ CollectProblem p) {
  each_of(p.of_w ? 2 * p.count : p.count,
          [&](int64_t i) { p.amax[i] = maximum_of(p.amax[i], i < p.count ? p.of_x[i] : p.of_w[i - p.count]); });
  if (thread() == 0) *p.number = *p.rule;
}

/// A thread for each state.
__global__ void plan_steps(const __grid_constant__ DelayedUpdateJob job) {
  each_of(job.count, [&](int64_t i) {
    const DelayedState& state = job.states[i];
    const double* const rule = find_rule(job.rules, job.rule_count, state);
    job.plans[i] = {rule, rows_in_use(state, job.backward)};
    if (!rule || has_length(state, rule)) return;
    atomicOr(job.broken, 1u);
    report(job.site, ValueRule::history_length, {.number = rule[kLength], .limit = state.rows});
  });
}

/// A warp for each slot: blockIdx.y counts blocks of slots.
__global__ void end_steps(const __grid_constant__ DelayedUpdateJob job) {
  const bool broken = *job.broken != 0;
  const int64_t warps = blockDim.x / kWarp, first = blockIdx.y * warps + threadIdx.x / kWarp;
  for (int64_t s = blockIdx.x; s < job.count; s += gridDim.x) {
    const DelayedState state = job.states[s];
    const StepPlan plan = job.plans[s];  // is read while `broken` is on its way
    if (broken || !plan.rule) continue;
    for (int64_t slot = first; slot < state.slots; slot += gridDim.y * warps)
      end_step_by_warp(state, plan.rule, job.backward, plan.in_use, slot);
    if (first == 0 && lane() == 0) rows_in_use(state, job.backward) = static_cast<int64_t>(plan.rule[kLength]);
  }
}

}  // extern "C"
