// Products by tensor cores: tiles of outputs from codes that are bfloat16 in shared memory. Products of codes are
// exact; the tensor cores sum them, within cuts of numerics.md 7.4. Cuts are added here, in order, every operation
// rounded by itself. An output's bits depend neither on the tile nor on other outputs.
#pragma once

#include "quire/cuda/kernels/bf16_codes.cuh"
#include "quire/cuda/kernels/tensor_sums.cuh"

namespace quire::cuda {

/// kTile x kTile outputs by a block of 2 kTile threads. Sums of codes are scaled and added after kCut of them.
template <int kTile, int kCut>
struct TensorMemory {
  static constexpr int kDepth = UnitReader<kTile>::kDepth;
  static constexpr int kLine = kDepth * 2;                         ///< bytes of a line
  static constexpr int kCuts = kCut < kDepth ? kDepth / kCut : 1;  ///< that end in a step, at most

  /// Of two steps, of which one is multiplied while the next one is written.
  alignas(128) unsigned char codes[2][2][kTile * kLine];  ///< [step][a or b]
  float scales[2][kCuts][2 * kTile];                      ///< of cuts, where sums are scaled: a's lines, then b's
  float factors[2 * kTile];                               ///< that no block changes: the same

  __device__ const UnitLayout& layout(int side) const { return reinterpret_cast<const UnitLayout&>(layouts_[side]); }
  /// Keeps a product, whose many numbers take no registers here. By all threads of a block, none of which reads the one
  /// before any more. folds(product): whether scales of a byte are multiplied into codes.
  template <class Folds>
  __device__ const OneProduct& hold(const OneProduct& p, const Folds& folds) {
    auto& kept = reinterpret_cast<OneProduct&>(product_);
    if (threadIdx.x == 0) {
      kept = p;
      write_layout(0, p.a, folds(p));
      write_layout(1, p.b, folds(p));
    }
    __syncthreads();
    return kept;
  }

 private:
  __device__ void write_layout(int side, const OperandValues& v, bool folds) {
    reinterpret_cast<UnitLayout&>(layouts_[side]) = UnitLayout(v, folds && has_byte_scales(v.from.spec));
  }

  alignas(OneProduct) unsigned char product_[sizeof(OneProduct)];
  alignas(UnitLayout) unsigned char layouts_[2][sizeof(UnitLayout)];  ///< of a and b
};

/// Where the chunk of 16 bytes of a line lies: 8 lines' ones in the same place are in different banks.
__device__ inline int place_of(int line, int chunk) { return line * 64 + ((chunk ^ (line >> 1 & 3)) * 16); }

/// One tile of a product, in memory that holds it.
template <int kTile, int kCut>
class TensorProduct {
 public:
  using Memory = TensorMemory<kTile, kCut>;

  __device__ TensorProduct(const OneProduct& product, Memory& memory, int64_t row, int64_t col)
      : p_(product),
        m_(memory),
        row_(row),
        col_(col),
        a_(p_.a, memory.layout(0), row),
        b_(p_.b, memory.layout(1), col),
        scaled_(is_scaled(p_.a, memory.layout(0)) || is_scaled(p_.b, memory.layout(1))) {}

  __device__ __forceinline__ void run() {
    const auto steps = static_cast<int>(ceil_div(p_.a.contraction, int64_t{kDepth}));
    put_factor();
    Ahead next;
    if (steps > 0) fetch(next, 0), put(next, 0);
    for (int step = 0; step < steps; ++step) {
      const bool more = step + 1 < steps;
      if (more) fetch(next, step + 1);
      __syncthreads();
      multiply(step % 2, !more || (step + 1) * kDepth % kCut == 0);
      if (more) put(next, (step + 1) % 2);
    }
    store();
  }

 private:
  static constexpr int kDepth = Memory::kDepth, kCuts = Memory::kCuts, kEach = UnitReader<kTile>::kEach;
  using Sums = TensorSums<kTile>;
  static constexpr int kDown = Sums::kDown, kAcross = Sums::kAcross;
  static constexpr int kHalves = kDepth / 16;  ///< of a step: instructions multiply 16 codes
  static_assert(Sums::stored_bytes() <= sizeof(Memory::codes));

  /// What this thread has read of a step that is not yet in shared memory.
  struct Ahead {
    RawUnit a[kEach], b[kEach];
    float scales[kCuts];
  };

  /// Whether an operand has scales that multiply sums.
  static __device__ bool is_scaled(const OperandValues& v, const UnitLayout& layout) {
    return v.has_block_scales() && !layout.scaled;
  }

  __device__ void fetch(Ahead& to, int step) {
    a_.read(to.a, step);
    b_.read(to.b, step);
    if (!scaled_) return;
    const OperandValues& v = mine();
    const bool in_sums = is_scaled(v, m_.layout(threadIdx.x / kTile));
#pragma unroll
    for (int c = 0; c < kCuts; ++c)
      to.scales[c] = in_sums ? scale_at(v, my_line(), int64_t{step} * kDepth + c * kCut) : 1.0f;
  }

  __device__ void put(const Ahead& from, int buffer) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const auto at = [&](int side, int place) -> uint4& {
        return *reinterpret_cast<uint4*>(m_.codes[buffer][side] + place);
      };
      at(0, place_of(a_.line(i), a_.chunk(i))) = m_.layout(0).decoder(from.a[i]);
      at(1, place_of(b_.line(i), b_.chunk(i))) = m_.layout(1).decoder(from.b[i]);
    }
    if (!scaled_) return;
#pragma unroll
    for (int c = 0; c < kCuts; ++c) m_.scales[buffer][c][threadIdx.x] = from.scales[c];
  }

  /// A step. `ends`: a cut ends with it.
  __device__ void multiply(int buffer, bool ends) {
    const int lane = cuda::lane(), chunk = lane >> 1 & 3;
    const uint32_t of_a = in_shared(m_.codes[buffer][0]) + (Sums::down() + lane % 16) * 64,
                   of_b = in_shared(m_.codes[buffer][1]) + (Sums::across() + lane / 16 * 8 + lane % 8) * 64;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t a[kDown][4], b[kAcross / 2][4];
#pragma unroll
      for (int m = 0; m < kDown; ++m) load_matrices(a[m], of_a + m * 1024 + (((half * 2 + lane / 16) ^ chunk) * 16));
#pragma unroll
      for (int n = 0; n < kAcross / 2; ++n)
        load_matrices(b[n], of_b + n * 1024 + (((half * 2 + lane / 8 % 2) ^ chunk) * 16));
#pragma unroll
      for (int m = 0; m < kDown; ++m)
#pragma unroll
        for (int n = 0; n < kAcross; ++n)
          multiply_add(sums_.cut[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      if (kCut <= 16 || (half == kHalves - 1 && (kCut <= kDepth || ends))) end_cut(buffer, half * 16 / kCut % kCuts);
    }
  }

  __device__ void end_cut(int buffer, int c) {
    if (scaled_) scale_cut(m_.scales[buffer][c]);
    sums_.end_cut();
  }

  __device__ void scale_cut(const float* scales) {
    float of_b[kAcross][2];
#pragma unroll
    for (int n = 0; n < kAcross; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) of_b[n][e] = scales[kTile + Sums::column_of(n, e)];
#pragma unroll
    for (int m = 0; m < kDown; ++m) {
      const float of_a[2] = {scales[Sums::line_of(m, 0)], scales[Sums::line_of(m, 2)]};
#pragma unroll
      for (int n = 0; n < kAcross; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_.cut[m][n][e] = sums_.cut[m][n][e] * of_a[e / 2] * of_b[n][e % 2];
    }
  }

  __device__ void put_factor() const {
    const OperandValues& v = mine();
    m_.factors[threadIdx.x] = my_line() < v.from.outer ? v.line_factor(my_line()) : 0.0f;
  }

  __device__ void store() {
    const float constant = product_constant(p_.a.from.spec, p_.b.from.spec);
    const int column = Sums::stored_column();
    sums_.store(m_.codes, [&](int line, float sum) {
      if (row_ + line < p_.to.out.rows && col_ + column < p_.to.out.cols)
        p_.to.store(row_ + line, col_ + column, sum * constant * m_.factors[line] * m_.factors[kTile + column]);
    });
  }

  /// This thread's line of a or b, whose scales it reads.
  __device__ const OperandValues& mine() const { return threadIdx.x < kTile ? p_.a : p_.b; }
  __device__ int64_t my_line() const { return (threadIdx.x < kTile ? row_ : col_) + threadIdx.x % kTile; }

  const OneProduct& p_;
  Memory& m_;
  int64_t row_, col_;
  UnitReader<kTile> a_, b_;
  bool scaled_;  ///< sums are
  Sums sums_;
};

/// The tiles of this block, of every product of a job.
template <int kTile, int kCut, class Folds>
__device__ void multiply_tiles(const GemmJob& job, const Folds& folds) {
  __shared__ TensorMemory<kTile, kCut> memory;
  bool held = false;  // a product, which other threads may not have finished
  each_product(job, [&](const OneProduct& one) {
    if (held) __syncthreads();
    held = true;
    const OneProduct& p = memory.hold(one, folds);
    const int64_t across = ceil_div(p.to.out.cols, int64_t{kTile}), down = ceil_div(p.to.out.rows, int64_t{kTile});
    for (int64_t t = blockIdx.x; t < across * down; t += gridDim.x) {
      if (t != blockIdx.x) __syncthreads();
      TensorProduct<kTile, kCut>(p, memory, t / across * kTile, t % across * kTile).run();
    }
  });
}

}  // namespace quire::cuda
