// Rows of x for skinny.cu: as bfloat16, in the order in which its warps take them. They are few, so that this takes a
// small part of the time of reading w.
#include "quire/cuda/kernels/bf16_codes.cuh"
#include "quire/cuda/kernels/skinny.h"

using namespace quire;
using namespace quire::cuda;

namespace {

constexpr int kPiece = kSkinnyUnits * kUnit;  ///< of a row, in a cut, that one lane has
static_assert(4 * kPiece == kLongestCut);

/// Where one group of rows goes.
struct Group {
  const SkinnyRows& to;
  int64_t tile, rows, contraction;

  /// unit(row, k): eight numbers as Bf16Decoder orders them. factor(row), cut_scale(row, k).
  template <class Unit, class Factor, class CutScale>
  __device__ void write(const Unit& unit, const Factor& factor, const CutScale& cut_scale) const {
    constexpr int64_t units = kSkinnyUnits * kWarp;  // of a tile in a cut
    const int64_t cuts = ceil_div(contraction, kLongestCut), tiles = ceil_div(rows, kSkinnyRows);
    each_of(cuts * tiles * units, [&](int64_t i) {
      const int64_t t = i / units % tiles, cut = i / units / tiles;
      const int u = static_cast<int>(i / kWarp % kSkinnyUnits), l = static_cast<int>(i % kWarp);
      const int64_t row = t * kSkinnyRows + l / 4, k = cut * kLongestCut + l % 4 * kPiece + u * kUnit;
      static_cast<uint4*>(to.numbers)[tile * cuts * units + i] =
          row < rows && k < contraction ? unit(row, k) : uint4{0, 0, 0, 0};
      if (u > 0 || l % 4 > 0) return;
      if (cut == 0) to.factors[tile * kSkinnyRows + row] = row < rows ? factor(row) : 0.0f;
      if (to.cut_scales)
        to.cut_scales[(tile * cuts + cut * tiles + t) * kSkinnyRows + l / 4] = row < rows ? cut_scale(row, k) : 0.0f;
    });
  }
};

/// Codes of a row, wherever they lie.
__device__ uint4 unit_of(const OperandValues& v, const Bf16Decoder& decoder, int64_t row, int64_t k) {
  const CodeLine line(v, row);
  RawUnit raw{line.word(line.packed() ? k / 8 : k / 4), line.packed() ? 0 : line.word(k / 4 + 1), 0};
  if (has_byte_scales(v.from.spec))
    raw.scale = static_cast<const uint8_t*>(
        v.from.scale)[scale_index({v.from.spec, v.from.direction, v.from.outer, v.blocks}, row, k / v.block)];
  return decoder(raw);
}

/// Numbers of a row of a matrix in the decoder's order.
__device__ uint4 unit_of(const Matrix& m, int64_t row, int64_t k) {
  const auto* const from = static_cast<const uint16_t*>(m.data) + row * m.row_stride + k;
  uint4 found;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    found = *reinterpret_cast<const uint4*>(from);
  } else {
    const auto pair = [&](int i) { return uint32_t{from[i]} | uint32_t{from[i + 1]} << 16; };
    found = {pair(0), pair(2), pair(4), pair(6)};
  }
  return {__byte_perm(found.x, found.z, 0x5410), __byte_perm(found.x, found.z, 0x7632),
          __byte_perm(found.y, found.w, 0x5410), __byte_perm(found.y, found.w, 0x7632)};
}

}  // namespace

extern "C" {

__global__ void skinny_codes(const __grid_constant__ SkinnyCodesJob job) {
  each_group(job.x.groups, [&](int64_t e, const GroupPlace& place) {
    if (place.rows == 0) return;
    const OperandValues v(operand_of(job.x, e, place));
    const Bf16Decoder decoder(v.from.spec, has_byte_scales(v.from.spec));
    Group{job.to, skinny_tile_of(e, place.begin), place.rows, v.contraction}.write(
        [&](int64_t row, int64_t k) { return unit_of(v, decoder, row, k); },
        [&](int64_t row) { return v.line_factor(row); }, [&](int64_t row, int64_t k) { return scale_at(v, row, k); });
  });
}

__global__ void skinny_plain(const __grid_constant__ SkinnyPlainJob job) {
  each_group(job.groups, [&](int64_t e, const GroupPlace& place) {
    if (place.rows == 0) return;
    const Matrix m = matrix_of(job.x, place);
    Group{job.to, skinny_tile_of(e, place.begin), place.rows, m.cols}.write(
        [&](int64_t row, int64_t k) { return unit_of(m, row, k); }, [](int64_t) { return 1.0f; },
        [](int64_t, int64_t) { return 1.0f; });
  });
}

}  // extern "C"
