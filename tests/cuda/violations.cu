// Device code that nvcc accepts without a word and that computes nothing of use: what the gate has to find.
#include <cstdint>

#include "quire/format/format.h"
#include "quire/spec/elementary.h"

namespace {

constexpr int64_t checked_product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? -1 : product;
}

// A kernel itself may not name the table: nvcc says so.
constexpr int mantissa_bits(int format) { return quire::kFormats[static_cast<std::size_t>(format)].man_bits; }
constexpr float coefficient(int i) { return quire::ExpRule::polynomial[i]; }

}  // namespace

extern "C" {

__global__ void calls_a_builtin_of_the_host(int64_t* x) { x[0] = checked_product(x[0], x[1]); }

__global__ void reads_a_table_of_the_host(int* x) { x[0] = mantissa_bits(x[0]); }

__global__ void reads_an_array_of_the_host(float* x, int i) { x[0] = coefficient(i); }

__global__ void traps(int* x) {
  if (x[0] < 0) __trap();
  x[0] = 1;
}

__global__ void indexes_a_local_array(int* x) {
  int values[16];
  for (int i = 0; i < 16; ++i) values[i] = x[i];
  x[0] = values[x[16]];
}

__global__ void obeys(int* x) { x[0] = quire::row(static_cast<quire::Format>(x[0])).man_bits; }

}  // extern "C"
