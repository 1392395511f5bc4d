// What the kernels of kernels.cu are given, and how many threads have work: for both sides of a launch.
#pragma once

#include <cstdint>

#include "quire/spec/block_codes.h"
#include "quire/spec/curve.h"
#include "quire/spec/delayed.h"
#include "quire/spec/groups.h"
#include "quire/spec/problem.h"

namespace quire::testing {

/// The activation and its slope of each x, which is not gated, or of the curve of a gated one.
struct CurveJob {
  Activation activation;
  const float* x;
  CurvePoint* points;
  int64_t count;
};

/// Every conversion of a number: to the formats and halves, and back.
struct Conversions {
  uint16_t f16, bf16;
  uint8_t e4m3, e5m2, e2m1;
  float from_f16, from_bf16, from_e4m3, from_e5m2, from_e2m1;
};
struct ConversionJob {
  const float* x;
  Conversions* results;
  int64_t count;
};

/// 16 numbers that become codes of E2M1 together: rounded to nearest, and by random words.
struct E2m1Codes {
  float x[16];
  uint32_t random[4];
  uint32_t rounded[2], stochastic[2];
};
struct E2m1Job {
  E2m1Codes* runs;
  int64_t count;
};

/// The update of each of `count` slots. history: [length, count]; scale: of each slot, read and written.
struct DelayedJob {
  DelayedRule rule;
  float* history;
  float* scale;
  int64_t length, count;
};

// What both compilers make of the same code; the test compares the results.

constexpr Conversions conversions_of(float x) {
  Conversions c{};
  c.f16 = f32_to_f16(x), c.bf16 = f32_to_bf16(x);
  c.e4m3 = encode_fast<Format::e4m3>(x), c.e5m2 = encode_fast<Format::e5m2>(x), c.e2m1 = encode_fast<Format::e2m1>(x);
  c.from_f16 = f16_to_f32(c.f16), c.from_bf16 = bf16_to_f32(c.bf16);
  c.from_e4m3 = decode_fast<Format::e4m3>(c.e4m3), c.from_e5m2 = decode_fast<Format::e5m2>(c.e5m2);
  c.from_e2m1 = decode_fast<Format::e2m1>(c.e2m1);
  return c;
}

}  // namespace quire::testing
