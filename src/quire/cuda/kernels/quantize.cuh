// The reference of quantization on a GPU: the rules of quire/spec, a thread for the values of each scale. It takes
// every spec, known at run time or when it is compiled.
#pragma once

#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/quantize.h"
#include "quire/cuda/kernels/threads.cuh"

namespace quire::cuda {

/// One group of a quantization.
struct Group {
  ValueLines values;
  Side side;
  Randomness random;
  const float* scale;
  const float* amaxes;

  __device__ Group(const QuantSpec& spec, const QuantizeJob& job, int64_t e, const GroupPlace& place)
      : values(spec, group_matrix(job.x, job.each, e, place), job.direction),
        side(side_of(spec, job.side, place)),
        random(job.random),
        scale(job.scale ? job.scale + e : nullptr),
        amaxes(job.amaxes ? job.amaxes + first_amax(spec, job.direction, e, place.begin, job.x.cols) : nullptr) {
    random.seed += static_cast<uint64_t>(e);
    random = random.read();
  }

  __device__ AboveBlock above(int64_t line) const {
    if (!amaxes) return {scale, 0};
    return {scale, number_above(values.spec, amaxes[has_amax_per_line(values.spec) ? line : 0], scale)};
  }

 private:
  static __device__ Side side_of(const QuantSpec& spec, const Side& all, const GroupPlace& place) {
    const int64_t width = has_byte_scales(spec) ? 1 : 4;
    Side side{static_cast<uint8_t*>(all.data) + place.at[0], static_cast<uint8_t*>(all.scale) + place.at[1] * width,
              nullptr};
    if (all.amax) side.amax = all.amax + place.at[2];
    return side;
  }
};

/// A group of a dequantization.
__device__ inline DequantizeProblem part_of(const DequantizeJob& job, const GroupPlace& place) {
  DequantizeProblem p = job.problem;
  if (!job.groups.places) return p;
  const int64_t width = has_byte_scales(p.spec) ? 1 : 4;
  p.out = matrix_of(p.out, place), p.rows = place.rows;
  p.data = static_cast<const uint8_t*>(p.data) + place.at[0];
  p.scale = static_cast<const uint8_t*>(p.scale) + place.at[1] * width;
  if (p.amax) p.amax += place.at[2];
  return p;
}

/// What does not belong to a part: amaxes, and the scales of lines or of the tensor.
__device__ inline void write_above(const Group& g) {
  const ValueLines& t = g.values;
  const FamilyRow row = t.spec.row();
  each_of(row.has_amax ? amax_count(t.spec, t.outer) : 0, [&](int64_t o) { g.side.amax[o] = g.above(o).number; });
  if (row.scope == Scope::block) return;
  each_of(row.scope == Scope::tensor ? 1 : t.outer,
          [&](int64_t o) { write_scale(t, {o, 0}, block_scale(t, {}, g.above(o)), g.side.scale); });
}

__device__ inline void quantize_part(const Group& g, const ValueTile& part) {
  const ValueLines& t = g.values;
  const bool of_block = t.spec.row().scope == Scope::block;
  const BlockScale s = block_scale(t, part, g.above(part.line));
  for (int64_t o = part.line; o < part.line + part.lines && o < t.outer; ++o) {
    // A tile has one scale of float32, or a byte in each of its lines.
    if (of_block && (o == part.line || has_byte_scales(t.spec)))
      write_scale(t, {o, part.begin / t.block}, s, g.side.scale);
    for (int64_t l = part.begin; l < part.end && l < t.contraction; l += kValueGroup)
      write_codes(t, {o, l}, s.multiplier, g.random, static_cast<uint8_t*>(g.side.data));
  }
}

__device__ inline void quantize_as(const QuantSpec& spec, const QuantizeJob& job) {
  each_group(job.groups, [&](int64_t e, const GroupPlace& place) {
    if ((job.groups.places && place.rows == 0) || !is_wanted(job.only, e)) return;
    const Group g(spec, job, e, place);
    write_above(g);
    const Parts parts(g.values);
    each_of(parts.count, [&](int64_t i) { quantize_part(g, parts[i]); });
  });
}

}  // namespace quire::cuda
