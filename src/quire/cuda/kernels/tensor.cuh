// Words of the tensor cores that every GPU from sm_80 has.
#pragma once

#include <cstdint>

namespace quire::cuda {

/// The address of shared memory, as these words take it.
__device__ inline uint32_t in_shared(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

/// Four matrices of 8 rows of 16 bytes: lane 8 m + r has the address of row r of matrix m, and gets of each one the
/// pair `lane % 4` of row lane / 4.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

/// Four matrices that memory has transposed: the lane gets of each one the pair `lane % 4` of column lane / 4 of what
/// lies there.
__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

/// d += a b for a [16, 16] and b [16, 8] of bfloat16. The lane has columns 2 (lane % 4) and the next one of d's rows
/// lane / 4 and the eighth after it.
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

/// The same of float16.
__device__ inline void multiply_add_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

/// Products of two pairs of bfloat16. What is added is -0, which changes no bit: sm_80 has no product alone.
__device__ inline uint32_t times(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(x), "r"(y), "r"(0x80008000u));
  return product;
}

}  // namespace quire::cuda
