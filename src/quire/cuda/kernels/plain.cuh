// Plain products: the problem of each group, and operands as rows of memory, of a matrix or of codes that become
// numbers on the way.
#pragma once

#include "quire/cuda/kernels/bf16_codes.cuh"
#include "quire/cuda/kernels/unit_values.cuh"

namespace quire::cuda {

/// An operand as memory has it: rows that are its lines, or, `across`, places of the contraction.
struct PlainOperand {
  Matrix m;         ///< of codes, whose data this does not have: their sizes and the dtype that they become
  Operand codes{};  ///< rowwise, with has_codes
  bool has_codes = false, across = false;
};

/// One product of a MatmulJob.
struct OnePlainProduct {
  PlainOperand a, b;
  int64_t contraction;
  ProductOutput to;
};

/// The second operand of a group, a matrix: rows of all where they are contracted, else one of equal matrices.
__device__ inline Matrix matrix_b_of(const MatmulJob& job, int64_t e, const GroupPlace& place) {
  if (job.bs) return job.bs[e];
  if (job.transpose_a && job.groups.places) return matrix_of(job.b, place);
  const int64_t rows = job.b.rows / job.groups.count;
  return matrix_of(job.b, GroupPlace{e * rows, rows, {}});
}

/// The same, or codes.
__device__ inline PlainOperand b_of(const MatmulJob& job, int64_t e, const GroupPlace& place) {
  const bool across = !job.transpose_b;
  if (job.has_codes) {
    const Operand codes = operand_of(job.codes, e, job.codes.groups[e]);
    return {{nullptr, job.out.all.dtype, codes.outer, codes.contraction, codes.contraction}, codes, true, across};
  }
  return {matrix_b_of(job, e, place), {}, false, across};
}

/// Calls each(product) for the groups of this block. Outputs of groups that contract nothing are zeroed, by each thread
/// of the block's row.
template <class Each>
__device__ void each_plain_product(const MatmulJob& job, Each&& each) {
  each_group(job.groups, [&](int64_t e, const GroupPlace& place) {
    const ProductOutput to = output_of(job.out, e, place, job.transpose_a ? job.a.cols : place.rows);
    if (job.out.in_groups && place.rows == 0) {
      if (!job.transpose_a) return;
      each_of(to.out.rows * to.out.cols, [&](int64_t i) {
        store_element(to.out.data, to.out.dtype, i / to.out.cols * to.out.row_stride + i % to.out.cols, 0.0f);
      });
      return;
    }
    each(OnePlainProduct{{matrix_of(job.a, place), {}, false, job.transpose_a},
                         b_of(job, e, place),
                         job.transpose_a ? place.rows : job.a.cols,
                         to});
  });
}

/// Where a row of an operand begins.
struct RowStart {
  const uint8_t* at;  ///< null: there is no such row
  const uint8_t* scale;
  uint32_t amax;  ///< as bits: of codes that have one
};

/// How the rows of an operand lie in memory. In shared memory, where it takes no registers.
class RowLayout {
 public:
  __device__ explicit RowLayout(const PlainOperand& o)
      : decoder_(o.codes.spec, false),
        data_(static_cast<const uint8_t*>(o.has_codes ? o.codes.data : o.m.data)),
        rows_(o.m.rows),
        cols_(o.m.cols),
        row_bytes_(o.m.row_stride * size_of(o.m.dtype)),
        dtype_(o.m.dtype),
        codes_(o.has_codes),
        across_(o.across) {
    if (codes_) lay_out_codes(o.codes);
    vectors_ = reinterpret_cast<uintptr_t>(data_) % 16 == 0 && row_bytes_ % 16 == 0;
  }

  __device__ bool across() const { return across_; }  ///< rows are contracted

  __device__ RowStart row(int64_t r) const {
    if (r >= rows_) return {nullptr, nullptr, kOne};
    if (!codes_) return {data_ + r * row_bytes_, nullptr, 0};
    RowStart start{};
    start.at = interleaved_ ? data_ + interleaved_offset(r, 0, row_bytes_) : data_ + r * row_bytes_;
    const int width = kind_ == ScaleKind::f32 ? 4 : 1;
    start.scale = scale_ + width * scale_index({spec_, Direction::rowwise, rows_, blocks_}, r, 0);
    if (amax_) start.amax = std::bit_cast<uint32_t>(amax_[amax_index(spec_, r)]);
    return start;
  }

  /// The unit of a row from column `col` on, a multiple of kUnit, for pairs(): numbers of kDType (of a matrix), or
  /// codes with what scales them. Zeros beyond the row.
  template <DType kDType>
  __device__ uint4 read(const RowStart& start, int64_t col) const {
    return codes_ ? read_codes(start, col) : read_numbers<kDType>(start, col);
  }
  template <DType kDType>
  __device__ uint4 read_numbers(const RowStart& start, int64_t col) const {
    static_assert(kDType != DType::f32, "a unit of float32 is read by values_at()");
    if (!start.at || col >= cols_) return {0, 0, 0, 0};
    if (vectors_ && col + kUnit <= cols_) {
      if (dtype_ == kDType) return *reinterpret_cast<const uint4*>(start.at + 2 * col);
      if (dtype_ == DType::f32) return vector_at(start, col).pairs<kDType>();
    }
    uint4 found{0, 0, 0, 0};
#pragma unroll 1
    for (int64_t at = (col + kUnit < cols_ ? col + kUnit : cols_) - 1; at >= col; --at) {
      found.w = __funnelshift_l(found.z, found.w, 16), found.z = __funnelshift_l(found.y, found.z, 16);
      found.y = __funnelshift_l(found.x, found.y, 16);
      found.x = found.x << 16 | (pair_of<kDType>(load_element(start.at, dtype_, at), 0.0f) & 0xFFFFu);
    }
    return found;
  }
  /// Codes in the first two words, then the scale of their block as stored, and the amax.
  __device__ uint4 read_codes(const RowStart& start, int64_t col) const {
    if (!start.at || col >= cols_) return {0, 0, 0, kOne};
    const int64_t left = cols_ - col;
    const uint8_t* const from = start.at + (col / kUnit) * (packed_ ? 1 : 2) * word_step_;
    uint4 raw{0, 0, stored_scale(start, col), start.amax};
    const int bytes = static_cast<int>(packed_ ? (left < kUnit ? (left + 1) / 2 : 4) : left < kUnit ? left : kUnit);
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 4 == 0;
    raw.x = word(from, bytes, aligned);
    if (!packed_) raw.y = word(from + word_step_, bytes - 4, aligned);
    if (packed_ && left < kUnit) raw.x &= (1u << 4 * left) - 1;
    return raw;
  }
  /// What was read, as numbers of kDType.
  template <DType kDType>
  __device__ uint4 pairs(const uint4& read) const {
    return codes_ ? values(read).template pairs<kDType>() : read;
  }
  /// Whether `count` elements from `col` on are there, in vectors of 16 bytes.
  __device__ bool has_vectors(const RowStart& start, int64_t col, int count) const {
    return start.at && vectors_ && !interleaved_ && col + count <= cols_;
  }
  /// Of the block of a code, as it is stored.
  __device__ uint32_t stored_scale(const RowStart& start, int64_t col) const {
    const int64_t block = col >> block_shift_;
    const uint8_t* const scale = start.scale + (block >> 2) * scale_step_4_ + (block & 3) * scale_step_;
    return kind_ == ScaleKind::f32 ? *reinterpret_cast<const uint32_t*>(scale) : *scale;
  }
  /// What multiplies codes under a scale and an amax, as read_codes() gives them.
  __device__ float scale_of(uint32_t stored, uint32_t amax) const {
    if (kind_ == ScaleKind::f32) return std::bit_cast<float>(stored);
    if (kind_ == ScaleKind::e8m0) return e8m0_value(static_cast<uint8_t>(stored));
    return nvfp4_value(Decoder(kBlockScaleFormat)(stored), std::bit_cast<float>(amax), spec_);
  }
  /// pairs() of codes under such a number, where it is known whether they are packed.
  template <DType kDType, bool kPacked>
  __device__ uint4 pairs_of(uint2 codes, float scale) const {
    return scaled(decoder_.of<kPacked>({codes.x, codes.y, 0}), scale).template pairs<kDType>();
  }
  /// A unit as float32.
  __device__ UnitValues values_at(const RowStart& start, int64_t col) const {
    if (codes_) return values(read_codes(start, col));
    if (!start.at || col >= cols_) return {};
    return numbers(start, col);
  }

 private:
  static constexpr uint32_t kOne = 0x3F800000;  ///< 1 as bits: an amax of zeros, which may be what divides them

  __device__ void lay_out_codes(const Operand& o) {
    const OperandValues v(o);
    const SideGrid grid{o.spec, Direction::rowwise, o.outer, v.blocks};
    spec_ = o.spec, kind_ = o.spec.row().scale, blocks_ = v.blocks;
    packed_ = o.spec.packed(), interleaved_ = o.spec.interleaved;
    row_bytes_ = packed_ ? ceil_div(o.contraction, 2) : o.contraction;
    word_step_ = interleaved_ ? kInterleavedLines * kInterleavedBytes : 4;
    scale_ = static_cast<const uint8_t*>(o.scale);
    amax_ = o.spec.row().has_amax ? o.amax : nullptr;
    block_shift_ = static_cast<uint8_t>(v.has_block_scales() ? __ffsll(v.block) - 1 : 62);
    const int64_t width = kind_ == ScaleKind::f32 ? 4 : 1, first = scale_index(grid, 0, 0);
    scale_step_ = width * (scale_index(grid, 0, 1) - first), scale_step_4_ = width * (scale_index(grid, 0, 4) - first);
  }

  static __device__ uint32_t word(const uint8_t* from, int bytes, bool aligned) {
    if (aligned && bytes >= 4) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t found = 0;
#pragma unroll 1
    for (int i = bytes < 4 ? bytes : 4; i > 0; --i) found = found << 8 | from[i - 1];
    return found;
  }

  /// Numbers of codes, as dequantize gives them in float32.
  __device__ UnitValues values(const uint4& raw) const {
    return scaled(decoder_({raw.x, raw.y, 0}), scale_of(raw.z, raw.w));
  }
  static __device__ UnitValues scaled(const uint4& codes, float scale) {
    const uint32_t pairs[kUnit / 2] = {codes.x, codes.y, codes.z, codes.w};
    UnitValues out;
#pragma unroll
    for (int k = 0; k < kUnit / 2; ++k) {
      out.v[k] = std::bit_cast<float>(pairs[k] << 16) * scale;
      out.v[k + kUnit / 2] = std::bit_cast<float>(pairs[k] & 0xFFFF0000u) * scale;
    }
    return out;
  }

  /// Numbers of a matrix in float32, which has as many.
  static __device__ UnitValues vector_at(const RowStart& start, int64_t col) {
    const auto* const from = reinterpret_cast<const float4*>(start.at + 4 * col);
    const float4 low = from[0], high = from[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
  /// Numbers of a matrix.
  __device__ UnitValues numbers(const RowStart& start, int64_t col) const {
    if (vectors_ && dtype_ == DType::f32 && col + kUnit <= cols_) return vector_at(start, col);
    UnitValues out;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) out.v[k] = col + k < cols_ ? load_element(start.at, dtype_, col + k) : 0.0f;
    return out;
  }

  Bf16Decoder decoder_;
  QuantSpec spec_;
  const uint8_t *data_, *scale_ = nullptr;
  const float* amax_ = nullptr;
  int64_t rows_, cols_, row_bytes_;
  int64_t word_step_ = 4, blocks_ = 1;         ///< of codes: from four bytes of a row to the next four
  int64_t scale_step_ = 0, scale_step_4_ = 0;  ///< bytes from a block to the next one, and to the fourth after it
  ScaleKind kind_ = ScaleKind::f32;
  DType dtype_;
  uint8_t block_shift_ = 62;  ///< log2 of a block
  bool codes_, across_, packed_ = false, interleaved_ = false, vectors_ = false;
};

/// A product and the layouts of its operands in shared memory.
class PlainMemory {
 public:
  /// Calls each() with every product of a job in turn, by all threads of a block.
  template <class Each>
  __device__ void each_held(const MatmulJob& job, const Each& each) {
    bool held = false;  // a product, which other threads may not have finished
    each_plain_product(job, [&](const OnePlainProduct& p) {
      if (held) __syncthreads();
      held = true;
      hold(p);
      each();
    });
  }
  __device__ const OnePlainProduct& product() const { return reinterpret_cast<const OnePlainProduct&>(product_); }
  __device__ const RowLayout& layout(int side) const { return reinterpret_cast<const RowLayout&>(layouts_[side]); }

 private:
  __device__ void hold(const OnePlainProduct& p) {
    if (threadIdx.x == 0) {
      reinterpret_cast<OnePlainProduct&>(product_) = p;
      reinterpret_cast<RowLayout&>(layouts_[0]) = RowLayout(p.a);
      reinterpret_cast<RowLayout&>(layouts_[1]) = RowLayout(p.b);
    }
    __syncthreads();
  }

  alignas(OnePlainProduct) unsigned char product_[sizeof(OnePlainProduct)];
  alignas(RowLayout) unsigned char layouts_[2][sizeof(RowLayout)];  ///< of a and b
};

}  // namespace quire::cuda
