// Kernels over the headers of the core, one for each of their rules: what nvcc makes of them gives the bytes of the
// CPU.
#include "cuda/kernels.h"

using namespace quire;
using namespace quire::testing;

namespace {

__device__ int64_t thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t threads() { return int64_t{gridDim.x} * blockDim.x; }

/// The amax above line o, given or measured.
__device__ float amax_above(const ValueLines& t, const QuantizeJob& job, int64_t o) {
  const int64_t i = has_amax_per_line(t.spec) ? o : 0;
  const float* given = job.problem.amax.of(t.direction);
  return given ? given[i] : std::bit_cast<float>(job.above[i]);
}

__device__ AboveBlock above(const ValueLines& t, const QuantizeJob& job, int64_t o) {
  const float* given = job.problem.scale;
  if (amax_count(t.spec, t.outer) == 0) return {given, 0};
  return {given, number_above(t.spec, amax_above(t, job, o), given)};
}

/// What does not belong to a part: amaxes, and the scales of lines or of the tensor.
__device__ void write_above(const ValueLines& t, const QuantizeJob& job, const Side& side) {
  const FamilyRow& row = t.spec.row();
  const int64_t amaxes = row.has_amax ? amax_count(t.spec, t.outer) : 0;
  for (int64_t o = thread(); o < amaxes; o += threads()) side.amax[o] = above(t, job, o).number;
  const int64_t scales = row.scope == Scope::block ? 0 : row.scope == Scope::tensor ? 1 : t.outer;
  for (int64_t o = thread(); o < scales; o += threads())
    write_scale(t, {o, 0}, block_scale(t, {}, above(t, job, o)), side.scale);
}

__device__ void quantize_part(const ValueLines& t, const ValueTile& part, const QuantizeJob& job, const Side& side) {
  const bool of_block = t.spec.row().scope == Scope::block;
  const BlockScale s = block_scale(t, part, above(t, job, part.line));
  const Randomness random = job.problem.random.read();
  for (int64_t o = part.line; o < part.line + part.lines && o < t.outer; ++o) {
    // A tile has one scale of float32, or a byte in each of its lines.
    if (of_block && (o == part.line || has_byte_scales(t.spec)))
      write_scale(t, {o, part.begin / t.block}, s, side.scale);
    for (int64_t l = part.begin; l < part.end && l < t.contraction; l += kValueGroup)
      write_codes(t, {o, l}, s.multiplier, random, static_cast<uint8_t*>(side.data));
  }
}

__device__ void quantize_as(const QuantSpec& spec, const QuantizeJob& job) {
  const ValueLines t(spec, job.problem.x, job.direction);
  const Side& side = job.direction == Direction::rowwise ? job.problem.rowwise : job.problem.columnwise;
  write_above(t, job, side);
  const Parts parts(t);
  for (int64_t i = thread(); i < parts.count; i += threads()) quantize_part(t, parts[i], job, side);
}

/// As quantize_as(), compiled for one spec.
template <QuantSpec kSpec>
__device__ void quantize_known(const QuantizeJob& job) {
  quantize_as(kSpec, job);
}

}  // namespace

extern "C" {

__global__ void measure_amax(const __grid_constant__ QuantizeJob job) {
  const ValueLines t(job.problem.spec, job.problem.x, job.direction);
  const Parts parts(t);
  for (int64_t i = thread(); i < parts.count; i += threads()) {
    const ValueTile part = parts[i];
    for (int64_t o = part.line; o < part.line + part.lines && o < t.outer; ++o) {
      const Measured found = measure(t, {o, 1, part.begin, part.end});
      // Magnitudes are ordered like their bits.
      atomicMax(&job.above[has_amax_per_line(t.spec) ? o : 0], std::bit_cast<uint32_t>(found.amax));
    }
  }
}

__global__ void quantize_any(const __grid_constant__ QuantizeJob job) { quantize_as(job.problem.spec, job); }

__global__ void quantize_mxfp8(const __grid_constant__ QuantizeJob job) { quantize_known<QuantSpec{}>(job); }

__global__ void quantize_fp8_block_pow2_nan(const __grid_constant__ QuantizeJob job) {
  quantize_known<QuantSpec{.family = Family::fp8_block, .pow2 = true, .nan = true}>(job);
}

__global__ void quantize_nvfp4_rht_sr_swizzled(const __grid_constant__ QuantizeJob job) {
  constexpr QuantSpec spec{.family = Family::nvfp4,
                           .element = Format::e2m1,
                           .hadamard = Hadamard::signs,
                           .stochastic = true,
                           .swizzled = true};
  quantize_known<spec>(job);
}

__global__ void dequantize_any(const __grid_constant__ DequantizeProblem p) {
  for (int64_t i = thread(); i < p.out.rows * p.out.cols; i += threads()) {
    const int64_t line = i / p.out.cols, position = i % p.out.cols;
    store_element(p.out.data, p.out.dtype, line * p.out.row_stride + position, value_of(p, line, position));
  }
}

__global__ void reorder(const __grid_constant__ ReorderJob job) {
  const Operand& from = job.from;
  const int64_t blocks = block_count(from.spec, from.contraction);
  const SideGrid codes{from.spec, from.direction, from.outer, from.contraction};
  const SideGrid scales{from.spec, from.direction, from.outer, blocks};
  const SideGrid to_codes{job.to, from.direction, from.outer, from.contraction};
  const SideGrid to_scales{job.to, from.direction, from.outer, blocks};
  const int64_t step = from.spec.packed() ? 2 : 1;
  for (int64_t o = thread(); o < from.outer; o += threads()) {
    for (int64_t l = 0; l < from.contraction; l += step)
      job.data[data_index(to_codes, o, l) / step] =
          static_cast<const uint8_t*>(from.data)[data_index(codes, o, l) / step];
    for (int64_t b = 0; b < blocks; ++b)
      job.scale[scale_index(to_scales, o, b)] = static_cast<const uint8_t*>(from.scale)[scale_index(scales, o, b)];
  }
}

__global__ void curves(const __grid_constant__ CurveJob job) {
  for (int64_t i = thread(); i < job.count; i += threads()) job.points[i] = point_of(job.activation, job.x[i]);
}

__global__ void convert(const __grid_constant__ ConversionJob job) {
  for (int64_t i = thread(); i < job.count; i += threads()) job.results[i] = conversions_of(job.x[i]);
}

__global__ void update_delayed(const __grid_constant__ DelayedJob job) {
  for (int64_t i = thread(); i < job.count; i += threads()) {
    const AmaxHistory history{job.history + i, job.length, job.count};
    job.scale[i] = delayed_update(job.rule, history, 0, job.scale[i]);
  }
}

}  // extern "C"
