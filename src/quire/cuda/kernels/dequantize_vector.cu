// Values of codes by accesses of 16 bytes. The bits are those of value_of() of block_codes.h: a code is exact in
// bfloat16, and its product with the scale is rounded to float32, and then to the dtype of the result.
#include "quire/cuda/kernels/dequantize_vector.h"

#include "quire/cuda/kernels/bf16_codes.cuh"
#include "quire/cuda/kernels/pairs.cuh"
#include "quire/cuda/kernels/quantize.cuh"
#include "quire/cuda/kernels/vectors.cuh"
#include "quire/format/fast.h"
#include "quire/spec/block_codes.h"

using namespace quire;
using namespace quire::cuda;

namespace {

/// What is compiled into a function: of the spec, and the dtype of the result.
struct Compiled {
  Kinds kinds;
  DType dtype;

  constexpr bool packed() const { return row(kinds.element).packed(); }
  /// Whether a family has lines that run against memory (blocks_first()).
  constexpr bool has_lines_across() const {
    return !packed() && std::ranges::any_of(
                            kFamilies, [this](const FamilyRow& f) { return !f.transposed && f.scale == kinds.scale; });
  }
  /// Lanes store 16 bytes at a time: two quads of codes that follow each other in 16 bits, or one in float32.
  constexpr bool in_pairs() const { return dtype != DType::f32; }
};

/// Calls body(Compiled as an integral_constant) for a problem.
template <size_t kFirst = 0, class Body>
__device__ void with_compiled(const DequantizeProblem& p, const Body& body) {
  if constexpr (kFirst < kKinds.size()) {
    constexpr Kinds kinds = kKinds[kFirst];
    if (p.spec.element != kinds.element || p.spec.row().scale != kinds.scale) return with_compiled<kFirst + 1>(p, body);
    with_dtype(p.out.dtype, [&](auto dtype) {
      constexpr Compiled compiled{kinds, dtype()};
      body(std::integral_constant<Compiled, compiled>());
    });
  }
}

/// The length of blocks that have this kind of scale: one for all families, as a constant.
template <ScaleKind kKind>
constexpr int kBlock = [] {
  int64_t block = 0;
  for (const FamilyRow& f : kFamilies)
    if (f.scale == kKind && f.scope == Scope::block) block = f.block;
  return static_cast<int>(block);
}();
static_assert(std::ranges::all_of(kFamilies, [](const FamilyRow& f) {
  const int block = f.scale == ScaleKind::f32    ? kBlock<ScaleKind::f32>
                    : f.scale == ScaleKind::e8m0 ? kBlock<ScaleKind::e8m0>
                                                 : kBlock<ScaleKind::two_level>;
  return f.scope != Scope::block || (f.block == block && std::has_single_bit(static_cast<unsigned>(block)));
}));

/// Where scales lie, as scale_index() places them, and what they are.
template <ScaleKind kKind>
class Scales {
 public:
  using Stored = std::conditional_t<kKind == ScaleKind::f32, float, uint8_t>;

  __device__ explicit Scales(const DequantizeProblem& problem)
      : p_(problem),
        blocks_(of_blocks() ? ceil_div(problem.out.cols, kBlock<kKind>) : 1),
        step_(static_cast<int>(index(0, 1) - index(0, 0))),
        step_4_(static_cast<int>(index(0, 4) - index(0, 0))),
        line_step_(static_cast<int>(index(1, 0) - index(0, 0))),
        shift_(of_blocks() ? std::countr_zero(static_cast<unsigned>(kBlock<kKind>)) : 31) {}

  __device__ const Stored* of_line(int64_t line) const { return static_cast<const Stored*>(p_.scale) + index(line, 0); }
  /// From a line to the next one, of four whose first is a multiple of 4.
  __device__ int line_step() const { return line_step_; }
  /// The number above the blocks of a line.
  __device__ float above(int64_t line) const {
    return kKind == ScaleKind::two_level ? p_.amax[amax_index(p_.spec, line)] : 0.0f;
  }
  /// From the first scale of a line to that of code l.
  __device__ int offset(int l) const {
    const int block = l >> shift_;
    return (block >> 2) * step_4_ + (block & 3) * step_;
  }
  __device__ float value(Stored stored, float above) const {
    if constexpr (kKind == ScaleKind::f32)
      return stored;
    else if constexpr (kKind == ScaleKind::e8m0)
      return e8m0_value(stored);
    else
      return nvfp4_value(decode_fast<kBlockScaleFormat>(stored), above, p_.spec);
  }

 private:
  __device__ bool of_blocks() const { return kKind != ScaleKind::f32 || p_.spec.row().scope == Scope::block; }
  __device__ int64_t index(int64_t line, int64_t block) const {
    return scale_index({p_.spec, p_.direction, p_.out.rows, blocks_}, line, block);
  }

  const DequantizeProblem& p_;
  int64_t blocks_;
  int step_, step_4_;  ///< from a block to the next one, and to the fourth one after it
  int line_step_;
  int shift_;  ///< log2 of a block
};

/// Two quads of codes as numbers of float32, without scales.
struct Quads {
  float first[4], second[4];

  template <Compiled kCompiled>
  static __device__ Quads of(const RawUnit& raw) {
    const Bf16Decoder decoder(QuantSpec{.element = kCompiled.kinds.element}, false);
    const uint4 all = decoder.of<kCompiled.packed()>(raw);
    const uint32_t pairs[4] = {all.x, all.y, all.z, all.w};
    Quads out;
    QUIRE_UNROLL
    for (int i = 0; i < 4; ++i)
      out.first[i] = std::bit_cast<float>(pairs[i] << 16), out.second[i] = std::bit_cast<float>(pairs[i] & 0xFFFF0000u);
    return out;
  }

  /// 16 bytes of 16 bits each, under one scale.
  template <DType kDType>
  __device__ void store_pairs(void* to, float scale) const {
    *static_cast<uint4*>(to) = {
        pair_of<kDType>(first[0] * scale, first[1] * scale), pair_of<kDType>(first[2] * scale, first[3] * scale),
        pair_of<kDType>(second[0] * scale, second[1] * scale), pair_of<kDType>(second[2] * scale, second[3] * scale)};
  }
  static __device__ void store_floats(const float (&quad)[4], void* to, float scale) {
    *static_cast<float4*>(to) = {quad[0] * scale, quad[1] * scale, quad[2] * scale, quad[3] * scale};
  }
};

/// Element `l` of a line of the result.
template <Compiled kCompiled>
__device__ void* result_at(const MutableMatrix& out, int64_t line, int64_t l) {
  return static_cast<char*>(out.data) + (line * out.row_stride + l) * size_of(kCompiled.dtype);
}

/// Quads of a line that runs along memory: a lane has those at l and l + kApart.
template <Compiled kCompiled>
struct Along {
  static constexpr int kUnits = kSegmentCodes / (kWarp * kUnit);  ///< of a lane
  static constexpr int kApart = kCompiled.in_pairs() ? 4 : kWarp * 4;
  using Stored = Scales<kCompiled.kinds.scale>::Stored;

  /// The first code of a unit, from the begin of the segment.
  static __device__ int place(int unit) { return unit * kWarp * kUnit + lane() * (kCompiled.in_pairs() ? kUnit : 4); }

  template <class Word>
  static __device__ uint32_t word(const uint8_t* codes, int l) {
    return *reinterpret_cast<const Word*>(codes + (kCompiled.packed() ? l / 2 : l));
  }
  /// `count`: codes of the line, of which there is one at l.
  static __device__ RawUnit codes_at(const uint8_t* codes, int l, int count) {
    const bool second = kCompiled.in_pairs() || l + kApart < count;
    using Quad = std::conditional_t<kCompiled.packed(), uint16_t, uint32_t>;
    if constexpr (kCompiled.in_pairs() && kCompiled.packed()) return {word<uint32_t>(codes, l), 0, 0};
    if constexpr (kCompiled.in_pairs()) {
      const uint2 both = *reinterpret_cast<const uint2*>(codes + l);
      return {both.x, both.y, 0};
    }
    const uint32_t low = word<Quad>(codes, l), high = second ? word<Quad>(codes, l + kApart) : 0;
    return kCompiled.packed() ? RawUnit{low | high << 16, 0, 0} : RawUnit{low, high, 0};
  }
};

template <Compiled kCompiled>
__device__ void decode_segment(const DequantizeProblem& p, const Scales<kCompiled.kinds.scale>& scales, int64_t line,
                               int begin) {
  using Units = Along<kCompiled>;
  const int count = static_cast<int>(p.out.cols);
  const int64_t bytes = kCompiled.packed() ? p.out.cols / 2 : p.out.cols;
  const auto* const codes = static_cast<const uint8_t*>(p.data) + line * bytes;
  const auto* const of_line = scales.of_line(line);
  const float above = scales.above(line);
  RawUnit raw[Units::kUnits];
  typename Units::Stored first[Units::kUnits] = {}, second[Units::kUnits] = {};
  QUIRE_UNROLL
  for (int i = 0; i < Units::kUnits; ++i) {
    const int l = begin + Units::place(i);
    raw[i] = {0, 0, 0};
    if (l >= count) continue;
    raw[i] = Units::codes_at(codes, l, count);
    first[i] = of_line[scales.offset(l)];
    if (!kCompiled.in_pairs() && l + Units::kApart < count) second[i] = of_line[scales.offset(l + Units::kApart)];
  }
  QUIRE_UNROLL
  for (int i = 0; i < Units::kUnits; ++i) {
    const int l = begin + Units::place(i);
    if (l >= count) continue;
    const Quads quads = Quads::of<kCompiled>(raw[i]);
    void* const to = result_at<kCompiled>(p.out, line, l);
    if constexpr (kCompiled.in_pairs()) {
      quads.store_pairs<kCompiled.dtype>(to, scales.value(first[i], above));
    } else {
      Quads::store_floats(quads.first, to, scales.value(first[i], above));
      if (l + Units::kApart < count)
        Quads::store_floats(quads.second, result_at<kCompiled>(p.out, line, l + Units::kApart),
                            scales.value(second[i], above));
    }
  }
}

/// Byte i of word j as byte j of word i.
__device__ void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t low = __byte_perm(w[0], w[1], 0x5140), low_2 = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t high = __byte_perm(w[0], w[1], 0x7362), high_2 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low, low_2, 0x5410), w[1] = __byte_perm(low, low_2, 0x7632);
  w[2] = __byte_perm(high, high_2, 0x5410), w[3] = __byte_perm(high, high_2, 0x7632);
}

/// Four positions of four lines against memory: a word has those of a position. Zeros if they are none of the lines.
__device__ void read_quads(uint32_t (&to)[4], const uint8_t* from, int64_t stride, bool exists) {
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) to[i] = exists ? *reinterpret_cast<const uint32_t*>(from + i * stride) : 0;
}

/// Lines against memory: a lane reads four lines' codes in words, and turns them. Eight lanes read 32 bytes, and four
/// write 64 in a line.
template <Compiled kCompiled>
__device__ void decode_square(const DequantizeProblem& p, const Scales<kCompiled.kinds.scale>& scales,
                              int64_t first_line, int first_code) {
  constexpr int in_turn = kCompiled.in_pairs() ? kUnit : 4, apart = kCompiled.in_pairs() ? 4 : kAcross / 2;
  const int64_t line = first_line + lane() % 8 * 4, stride = p.out.rows;
  const int l = first_code + lane() / 8 * in_turn, count = static_cast<int>(p.out.cols);
  if (line >= p.out.rows || l >= count) return;
  const bool has_second = l + apart < count;
  const auto* const codes = static_cast<const uint8_t*>(p.data) + l * stride + line;
  uint32_t first[4], second[4];
  read_quads(first, codes, stride, true), read_quads(second, codes + apart * stride, stride, has_second);
  const auto* const of_line = scales.of_line(line);
  typename Scales<kCompiled.kinds.scale>::Stored stored[4];
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) stored[i] = of_line[scales.offset(first_code) + i * scales.line_step()];
  transpose_bytes(first), transpose_bytes(second);
  QUIRE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Quads quads = Quads::of<kCompiled>({first[i], second[i], 0});
    const float scale = scales.value(stored[i], scales.above(line + i));
    void* const to = result_at<kCompiled>(p.out, line + i, l);
    if constexpr (kCompiled.in_pairs()) {
      quads.store_pairs<kCompiled.dtype>(to, scale);
    } else {
      Quads::store_floats(quads.first, to, scale);
      if (has_second) Quads::store_floats(quads.second, result_at<kCompiled>(p.out, line + i, l + apart), scale);
    }
  }
}

}  // namespace

extern "C" {

__global__ void dequantize_along(const __grid_constant__ DequantizeJob job) {
  each_group(job.groups, [&](int64_t, const GroupPlace& place) {
    const DequantizeProblem p = part_of(job, place);
    const auto segments = static_cast<uint32_t>(ceil_div(p.out.cols, kSegmentCodes));
    with_compiled(p, [&](auto compiled) {
      const Scales<compiled().kinds.scale> scales(p);
      each_of_warps(p.out.rows * segments, [&](int64_t i) {
        const uint32_t line = static_cast<uint32_t>(i) / segments, segment = static_cast<uint32_t>(i) % segments;
        decode_segment<compiled()>(p, scales, line, static_cast<int>(segment * kSegmentCodes));
      });
    });
  });
}

__global__ void dequantize_across(const __grid_constant__ DequantizeJob job) {
  static_assert(
      std::ranges::all_of(kFamilies, [](const FamilyRow& f) { return f.transposed || f.block % kAcross == 0; }),
      "the codes of a line that are in a square have one scale");
  const DequantizeProblem& p = job.problem;
  const auto down = static_cast<uint32_t>(ceil_div(p.out.rows, kAcross));
  const int64_t turns = ceil_div(p.out.cols, kAcross * kAcrossInTurn);
  with_compiled(p, [&](auto compiled) {
    if constexpr (compiled().has_lines_across()) {
      const Scales<compiled().kinds.scale> scales(p);
      each_of_warps(turns * down * kAcrossInTurn, [&](int64_t i) {
        const uint32_t number = static_cast<uint32_t>(i), turn = number / kAcrossInTurn;
        const uint32_t square = turn / down * kAcrossInTurn + number % kAcrossInTurn;
        decode_square<compiled()>(p, scales, turn % down * kAcross, static_cast<int>(square * kAcross));
      });
    }
  });
}

}  // extern "C"
