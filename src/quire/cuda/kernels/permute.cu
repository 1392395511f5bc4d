// Rows between the order of tokens and the order of experts, and sums of them: any dtype, any alignment. Nothing is
// added in an order that depends on threads.
#include "quire/cuda/kernels/permute.cuh"

#include "quire/spec/matrix_element.h"
#include "quire/spec/sums.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// Some columns of a row in float32.
using Piece = std::array<float, Segments::kPieces>;

/// A segment of the sum of a token's rows.
struct Sum {
  const UnpermuteJob& job;
  Slots slots;        ///< of the token
  bool reports;       ///< whether this lane does
  int64_t first_col;  ///< of this lane; the next one is kWarp to the right

  __device__ int64_t row(int64_t slot) const {
    return row_of(job.problem.map, slot, job.problem.from.rows, job.site, reports);
  }
  /// The first slot that has a row, from this one on.
  __device__ int64_t next(int64_t slot) const {
    while (slot < slots.end && row(slot) < 0) ++slot;
    return slot;
  }
  __device__ void load(int64_t slot, Piece& to) const {
    const UnpermuteProblem& p = job.problem;
    const int64_t from = row(slot);
    for (int64_t i = 0; i < Segments::kPieces; ++i)
      if (const int64_t col = first_col + i * kWarp; col < p.from.cols) {
        to[i] = load_element(p.from, from, col);
        if (p.weights) to[i] *= p.weights[slot];
      }
  }
  __device__ void store(const Piece& sum, int64_t token) const {
    for (int64_t i = 0; i < Segments::kPieces; ++i)
      if (const int64_t col = first_col + i * kWarp; col < job.problem.to.cols)
        store_element(job.problem.to, token, col, sum[i]);
  }
};

}  // namespace

extern "C" {

__global__ void find_sources(const __grid_constant__ PermuteJob job) {
  const RowMap& map = job.problem.map;
  each_of(map.tokens * map.slots, [&](int64_t place) {
    const int64_t row = row_of(map, place, job.problem.to.rows, job.site, true);
    if (row >= 0) job.source[row] = place;
  });
}

__global__ void permute_rows(const __grid_constant__ PermuteJob job) {
  const PermuteProblem& p = job.problem;
  const Copy copy{job.row, job.unit};
  check_sources(job);
  each_of_warps(p.to.rows * job.row.segments, [&](int64_t i) {
    const int64_t row = i / job.row.segments, segment = i % job.row.segments, place = job.source[row];
    std::byte* const to = row_at(p.to, row);
    if (place < 0 || !p.weights) return copy(place < 0 ? nullptr : row_at(p.from, place / p.map.slots), to, segment);
    each_piece(job.row, segment, [&](int64_t col) {
      store_element(p.to, row, col, load_element(p.from, place / p.map.slots, col) * p.weights[place]);
    });
  });
}

__global__ void unpermute_rows(const __grid_constant__ UnpermuteJob job) {
  const UnpermuteProblem& p = job.problem;
  each_of_warps(p.to.rows * job.row.segments, [&](int64_t i) {
    const int64_t token = i / job.row.segments, segment = i % job.row.segments;
    Sum sum{.job = job,
            .slots = {token * p.map.slots, (token + 1) * p.map.slots},
            .reports = segment == 0 && lane() == 0,
            .first_col = segment * Segments::kPieces * kWarp + lane()};
    sum.slots.begin = sum.next(sum.slots.begin);
    const auto next = [&](int64_t slot) { return sum.next(slot); };
    const bool none = sum.slots.begin == sum.slots.end;
    // Each bit of a row that stands alone stays.
    if (none || (!p.weights && next(sum.slots.begin + 1) == sum.slots.end))
      return Copy{job.row, size_of(p.to.dtype)}(none ? nullptr : row_at(p.from, sum.row(sum.slots.begin)),
                                                row_at(p.to, token), segment);
    Piece total, row;
    add_rows(sum.slots, total, row, next, [&](int64_t slot, Piece& to) { sum.load(slot, to); });
    sum.store(total, token);
  });
}

/// Half a warp for each place. A lane has one of the 16 partial sums of SumOfRow, which are added by halves.
__global__ void permuted_dots(const __grid_constant__ PermutedDotJob job) {
  const PermutedDotProblem& p = job.problem;
  constexpr int half_warp = kWarp / 2;
  static_assert(half_warp == kRowSums);
  const int64_t places = p.map.tokens * p.map.slots;
  each_of_warps(ceil_div(places, 2), [&](int64_t pair) {
    const int64_t place = pair * 2 + lane() / half_warp;
    const int part = lane() % half_warp;
    const int64_t row = place < places ? row_of(p.map, place, p.permuted.rows, job.site, part == 0) : -1;
    float sum = 0;
    for (int64_t i = part; row >= 0 && i < p.tokens.cols; i += half_warp)
      sum += load_element(p.tokens, place / p.map.slots, i) * load_element(p.permuted, row, i);
    for (int half = half_warp / 2; half > 0; half /= 2) sum += __shfl_down_sync(kAllLanes, sum, half, half_warp);
    if (part == 0 && place < places) p.to[place] = sum;
  });
}

}  // extern "C"
