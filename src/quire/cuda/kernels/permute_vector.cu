// Rows with weights, and sums and products of rows, by accesses of 16 bytes. The bits are those of permute.cu: sums
// have the same order.
#include <array>
#include <optional>

#include "quire/cuda/kernels/permute.cuh"
#include "quire/cuda/kernels/vectors.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

/// What a lane has of a segment of a row: vectors.
using Piece = std::array<float, Segments::kPieces * kVector>;

/// A lane's place within a segment.
struct LanePlace {
  const Segments& row;
  int64_t first;  ///< vector; the next one is kWarp to the right

  __device__ LanePlace(const Segments& of, int64_t segment)
      : row(of), first(segment * Segments::kPieces * kWarp + lane()) {}

  /// Under a weight, if there is one. All of a lane's memory is asked for before any number of it is needed.
  template <DType kDType>
  __device__ void load(const Matrix& m, int64_t from, std::optional<float> weight, Piece& to) const {
    struct alignas(16) Raw {
      uint4 words[kVector * size_of(kDType) / 16];
    };
    const auto* const memory = reinterpret_cast<const Raw*>(row_at(m, from));
    Raw raw[Segments::kPieces];
    QUIRE_UNROLL
    for (int64_t i = 0; i < Segments::kPieces; ++i)
      raw[i] = first + i * kWarp < row.pieces ? memory[first + i * kWarp] : Raw{};
    QUIRE_UNROLL
    for (int64_t i = 0; i < Segments::kPieces; ++i) {
      const Floats found = load_vector(&raw[i], kDType, 0);
      QUIRE_UNROLL
      for (int k = 0; k < kVector; ++k) to[i * kVector + k] = weight ? found.v[k] * *weight : found.v[k];
    }
  }
  template <DType kDType>
  __device__ void store(const MutableMatrix& m, int64_t to, const Piece& from) const {
    QUIRE_UNROLL
    for (int64_t i = 0; i < Segments::kPieces; ++i) {
      if (first + i * kWarp >= row.pieces) continue;
      const Floats values = made_vector([&](int k) { return from[i * kVector + k]; });
      store_vector(m.data, kDType, to * m.row_stride + (first + i * kWarp) * kVector, values);
    }
  }
};

/// A row of the result: that of its place under its weight, or zeros.
template <DType kDType>
__device__ void permute_segment(const PermuteJob& job, int64_t row, int64_t segment) {
  const PermuteProblem& p = job.problem;
  const LanePlace place(job.row, segment);
  const int64_t source = job.source[row];
  Piece values{};
  if (source >= 0) place.load<kDType>(p.from, source / p.map.slots, p.weights[source], values);
  place.store<kDType>(p.to, row, values);
}

/// The sum of a token's rows.
template <DType kDType>
__device__ void unpermute_segment(const UnpermuteJob& job, int64_t token, int64_t segment) {
  const UnpermuteProblem& p = job.problem;
  const LanePlace place(job.row, segment);
  const bool reports = segment == 0 && lane() == 0;
  Slots slots{token * p.map.slots, (token + 1) * p.map.slots};
  const auto row = [&](int64_t slot) { return row_of(p.map, slot, p.from.rows, job.site, reports); };
  const auto next = [&](int64_t slot) {
    while (slot < slots.end && row(slot) < 0) ++slot;
    return slot;
  };
  const auto load = [&](int64_t slot, Piece& to) {
    place.load<kDType>(p.from, row(slot), p.weights ? std::optional(p.weights[slot]) : std::nullopt, to);
  };
  slots.begin = next(slots.begin);
  Piece sum{}, one{};
  const bool none = slots.begin == slots.end;
  // Each bit of a row that stands alone stays; those of float32 do in any case.
  if (kDType != DType::f32 && !none && !p.weights && next(slots.begin + 1) == slots.end)
    return Copy{job.row, sizeof(uint4)}(row_at(p.from, row(slots.begin)), row_at(p.to, token), segment);
  if (!none) add_rows(slots, sum, one, next, load);
  place.store<kDType>(p.to, token, sum);
}

/// SumOfRow by two lanes, each of which has eight of the partial sums: those of its vectors' elements. The first of
/// them gets the sum.
template <DType kDType>
__device__ float dot_by_two_lanes(const void* a, const void* b, int64_t cols) {
  float sums[kVector] = {};
#pragma unroll 4
  for (int64_t col = lane() % 2 * kVector; col < cols; col += 2 * kVector) {
    const Floats x = load_vector(a, kDType, col), y = load_vector(b, kDType, col);
    QUIRE_UNROLL
    for (int k = 0; k < kVector; ++k) sums[k] += x.v[k] * y.v[k];
  }
  static_assert(kRowSums == 2 * kVector);
  QUIRE_UNROLL
  for (int k = 0; k < kVector; ++k) sums[k] += __shfl_down_sync(kAllLanes, sums[k], 1);
  QUIRE_UNROLL
  for (int half = kVector / 2; half > 0; half /= 2) {
    QUIRE_UNROLL
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0];
}

}  // namespace

extern "C" {

__global__ void permute_vectors(const __grid_constant__ PermuteJob job) {
  check_sources(job);
  with_dtype(job.problem.to.dtype, [&](auto dtype) {
    const auto segments = static_cast<uint32_t>(job.row.segments);
    each_of_warps(job.problem.to.rows * segments, [&](int64_t i) {
      permute_segment<dtype()>(job, static_cast<uint32_t>(i) / segments, static_cast<uint32_t>(i) % segments);
    });
  });
}

__global__ void unpermute_vectors(const __grid_constant__ UnpermuteJob job) {
  with_dtype(job.problem.to.dtype, [&](auto dtype) {
    const auto segments = static_cast<uint32_t>(job.row.segments);
    each_of_warps(job.problem.to.rows * segments, [&](int64_t i) {
      unpermute_segment<dtype()>(job, static_cast<uint32_t>(i) / segments, static_cast<uint32_t>(i) % segments);
    });
  });
}

/// Two lanes for each place.
__global__ void permuted_dot_vectors(const __grid_constant__ PermutedDotJob job) {
  const PermutedDotProblem& p = job.problem;
  const int64_t places = p.map.tokens * p.map.slots;
  each_of_warps(ceil_div(places, kWarp / 2), [&](int64_t group) {
    const int64_t place = group * (kWarp / 2) + lane() / 2;
    const bool first = lane() % 2 == 0;
    const int64_t row = place < places ? row_of(p.map, place, p.permuted.rows, job.site, first) : -1;
    const auto* const permuted = row_at(p.permuted, row < 0 ? 0 : row);
    const auto* const token = row_at(p.tokens, row < 0 ? 0 : place / p.map.slots);
    with_dtype(p.permuted.dtype, [&](auto dtype) {
      const float sum = dot_by_two_lanes<dtype()>(token, permuted, row < 0 ? 0 : p.tokens.cols);
      if (first && place < places) p.to[place] = sum;
    });
  });
}

}  // extern "C"
