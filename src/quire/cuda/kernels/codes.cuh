// Codes of one line of an operand, read in words of four bytes and decoded to float32.
#pragma once

#include "quire/cuda/kernels/gemm.cuh"

namespace quire::cuda {

/// The number of a code: the bits of decode(), except which NaN it is.
class Decoder {
 public:
  __device__ explicit Decoder(Format format)
      : magnitudes_(static_cast<uint32_t>(row(format).magnitudes() - 1)),
        last_(static_cast<uint32_t>(row(format).max_code())),
        infinite_(row(format).specials == Specials::ieee ? last_ + 1 : ~0u),
        shift_(23 - row(format).man_bits),
        sign_(row(format).exp_bits + row(format).man_bits),
        unit_(std::bit_cast<float>(static_cast<uint32_t>(254 - row(format).bias) << 23)) {}

  /// Of the low bits of `code`.
  __device__ float operator()(uint32_t code) const {
    const uint32_t magnitude = code & magnitudes_;
    // The bits as those of a float32 with another bias: subnormal ones become normal, exactly.
    uint32_t value = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << shift_) * unit_);
    if (magnitude > last_) value = magnitude == infinite_ ? 0x7F800000u : 0x7FC00000u;
    return std::bit_cast<float>(value | (code >> sign_ & 1u) << 31);
  }

 private:
  uint32_t magnitudes_, last_, infinite_;
  int shift_, sign_;
  float unit_;
};

/// Where a line's codes lie. What is beyond the line, or a line that the operand does not have, is zeros.
class CodeLine {
 public:
  CodeLine() = default;  // of nothing: for shared memory
  __device__ CodeLine(const OperandValues& v, int64_t line)
      : word_step_(4), byte_step_(1), alignment_(1), packed_(v.from.spec.packed()) {
    const auto* const data = static_cast<const uint8_t*>(v.from.data);
    const int64_t bytes = packed_ ? ceil_div(v.contraction, 2) : v.contraction;
    bytes_ = line < v.from.outer ? bytes : 0;
    if (v.from.spec.interleaved)
      at_ = data + interleaved_offset(line, 0, bytes), word_step_ = kInterleavedLines * kInterleavedBytes;
    else if (blocks_first(v.from.spec, v.from.direction))
      at_ = data + line, byte_step_ = v.from.outer, word_step_ = 4 * v.from.outer;
    else
      at_ = data + line * bytes;
    if (byte_step_ == 1)
      alignment_ = reinterpret_cast<uintptr_t>(at_) % 16 == 0 && word_step_ == 4 ? 16
                   : reinterpret_cast<uintptr_t>(at_) % 4 == 0                   ? 4
                                                                                 : 1;
  }

  __device__ bool packed() const { return packed_; }
  __device__ const uint8_t* begin() const { return at_; }
  /// Bytes from a word to the next one, and from a byte of a word to the next one.
  __device__ int64_t word_step() const { return word_step_; }
  __device__ int64_t byte_step() const { return byte_step_; }
  /// Of words, in bytes; 16 where those of a line follow each other.
  __device__ int alignment() const { return alignment_; }

  /// Bytes 4 w to 4 w + 3.
  __device__ uint32_t word(int64_t w) const {
    const uint8_t* const from = at_ + w * word_step_;
    if (alignment_ >= 4 && 4 * w + 4 <= bytes_) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t found = 0;
    for (int i = 0; i < 4 && 4 * w + i < bytes_; ++i) found |= uint32_t{from[i * byte_step_]} << 8 * i;
    return found;
  }
  /// Words w to w + 3; w is a multiple of 4.
  __device__ uint4 words(int64_t w) const {
    if (alignment_ == 16 && 4 * w + 16 <= bytes_) return *reinterpret_cast<const uint4*>(at_ + 4 * w);
    return {word(w), word(w + 1), word(w + 2), word(w + 3)};
  }

 private:
  const uint8_t* at_;
  int64_t bytes_, word_step_, byte_step_;
  int alignment_;
  bool packed_;
};

/// A product in shared memory, where its many numbers take no registers.
class SharedProduct {
 public:
  /// By all threads of a block, none of which reads the one before any more after this has begun.
  __device__ const OneProduct& hold(const OneProduct& p) {
    auto& kept = reinterpret_cast<OneProduct&>(bytes_);
    __syncthreads();
    if (threadIdx.x == 0) kept = p;
    __syncthreads();
    return kept;
  }

 private:
  alignas(OneProduct) unsigned char bytes_[sizeof(OneProduct)];
};

/// Products of codes are summed to here without scales: both operands' cuts end there.
__device__ inline int64_t cut_of(const OneProduct& p) {
  const int64_t a = p.a.longest_cut(), b = p.b.longest_cut();
  return a < b ? a : b;
}

/// The scale of the block of element (o, l); 0 beyond the operand, where sums are 0.
__device__ inline float scale_at(const OperandValues& v, int64_t o, int64_t l) {
  if (o >= v.from.outer || l >= v.contraction) return 0.0f;
  return v.block_scale(o, v.has_block_scales() ? l >> (__ffsll(v.block) - 1) : 0);
}

/// A finished sum under the scales that no block changes, one after the other (numerics.md 7.4).
__device__ inline float finished(const OneProduct& p, int64_t i, int64_t j, float sum) {
  return sum * product_constant(p.a.from.spec, p.b.from.spec) * p.a.line_factor(i) * p.b.line_factor(j);
}

}  // namespace quire::cuda
