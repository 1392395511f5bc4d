#include "quire/cuda/kernels/quantize.cuh"

#include "quire/cuda/kernels/fault.cuh"

using namespace quire;
using namespace quire::cuda;

extern "C" {

__global__ void measure_amax(const __grid_constant__ AmaxJob job) {
  each_group(job.groups, [&](int64_t e, const GroupPlace& place) {
    const ValueLines t(job.spec, group_matrix(job.x, job.each, e, place), job.direction);
    uint32_t* const to = job.to + first_amax(job.spec, job.direction, e, place.begin, job.x.cols);
    const Parts parts(t);
    each_of(parts.count, [&](int64_t i) {
      const ValueTile part = parts[i];
      for (int64_t o = part.line; o < part.line + part.lines && o < t.outer; ++o) {
        const Measured found = measure(t, {o, 1, part.begin, part.end});
        atomicMax(&to[has_amax_per_line(t.spec) ? o : 0], std::bit_cast<uint32_t>(found.amax));
      }
    });
  });
}

__global__ void quantize_any(const __grid_constant__ QuantizeJob job) { quantize_as(job.spec, job); }

__global__ void check_given(const __grid_constant__ GivenJob job) {
  const auto counts = [&](int64_t group) { return !job.groups.places || job.groups[group].rows > 0; };
  each_of(job.scale ? job.groups.count : 0, [&](int64_t e) {
    const float scale = job.scale[e];
    if (counts(e) && !(scale > 0 && is_finite(scale))) report(job.of_scale, ValueRule::given_scale, {.number = scale});
  });
  const bool lines = has_amax_per_line(job.spec), rows = lines && job.direction == Direction::rowwise;
  each_of(job.amaxes ? job.count : 0, [&](int64_t i) {
    const float amax = job.amaxes[i];
    const bool counted = rows ? !job.groups.places || i < job.groups[job.groups.count].begin
                              : counts(lines && job.cols > 0 ? i / job.cols : i);
    if (counted && !(amax >= 0)) report(job.of_amax, ValueRule::given_amax, {.index = i, .number = amax});
  });
}

__global__ void dequantize_any(const __grid_constant__ DequantizeJob job) {
  each_group(job.groups, [&](int64_t, const GroupPlace& place) {
    const DequantizeProblem p = part_of(job, place);
    each_of(p.out.rows * p.out.cols, [&](int64_t i) {
      const int64_t line = i / p.out.cols, position = i % p.out.cols;
      store_element(p.out.data, p.out.dtype, line * p.out.row_stride + position, value_of(p, line, position));
    });
  });
}

__global__ void reorder(const __grid_constant__ ReorderJob job) {
  const Operand& from = job.from;
  const int64_t blocks = block_count(from.spec, from.contraction);
  const SideGrid codes{from.spec, from.direction, from.outer, from.contraction};
  const SideGrid scales{from.spec, from.direction, from.outer, blocks};
  const SideGrid to_codes{job.to, from.direction, from.outer, from.contraction};
  const SideGrid to_scales{job.to, from.direction, from.outer, blocks};
  const int64_t step = from.spec.packed() ? 2 : 1;
  each_of(job.f32_scales,
          [&](int64_t i) { reinterpret_cast<float*>(job.scale)[i] = static_cast<const float*>(from.scale)[i]; });
  each_of(from.outer, [&](int64_t o) {
    for (int64_t l = 0; l < from.contraction; l += step)
      job.data[data_index(to_codes, o, l) / step] =
          static_cast<const uint8_t*>(from.data)[data_index(codes, o, l) / step];
    for (int64_t b = 0; has_byte_scales(from.spec) && b < blocks; ++b)
      job.scale[scale_index(to_scales, o, b)] = static_cast<const uint8_t*>(from.scale)[scale_index(scales, o, b)];
  });
}

}  // extern "C"
