// What only NVFP4 does to a block: its scale under a global amax, four-over-six, stochastic rounding.

constexpr int64_t kNvfp4Block = 16;

struct Nvfp4Scale {
  uint8_t byte;
  float value;
  float multiplier;
};

/// `wanted`: the block scale before it is rounded to E4M3.
inline Nvfp4Scale nvfp4_scale(float wanted, const GlobalScale& g) {
  const uint8_t byte = encode_fast<Format::e4m3>(wanted);
  const float value = decode_fast<Format::e4m3>(byte);
  return {byte, value, nvfp4_multiplier(value, g)};
}

/// numerics.md 5.1.
inline Nvfp4Scale nvfp4_scale_of(float amax, const GlobalScale& g) {
  return nvfp4_scale(std::min(amax * g.block_mult, kFloatMax), g);
}

/// Error of one block's values under a candidate scale, summed in order (numerics.md 5.8, 0.5).
[[gnu::flatten]] inline float four_over_six_error(const QuantSpec& spec, const float* values, const Nvfp4Scale& scale,
                                                  float amax) {
  const float divisor = 6.0f * spec.e4m3_max();
  float terms[kNvfp4Block];
  for (int64_t j = 0; j < kNvfp4Block; ++j) {
    const float decoded = decode_fast<Format::e2m1>(encode_fast<Format::e2m1>(values[j] * scale.multiplier));
    const float d = decoded * scale.value * amax / divisor - values[j];
    terms[j] = spec.four_over_six == FourOverSix::mse ? d * d : std::fabs(d);
  }
  float sum = 0;
  for (const float term : terms) sum += term;
  return sum;
}

/// Errors of the lines of a tile, added as a tree (numerics.md 5.8).
inline float tree_sum(float (&errors)[kNvfp4Block]) {
  for (int64_t offset = kNvfp4Block / 2; offset > 0; offset /= 2)
    for (int64_t i = 0; i < offset; ++i) errors[i] += errors[i + offset];
  return errors[0];
}

/// The better of the two scales of a block, which is `count` lines (one, or those of a 16x16 tile) kLineStride apart.
inline Nvfp4Scale four_over_six_scale(const QuantSpec& spec, const float* values, int64_t count, float amax,
                                      const GlobalScale& g) {
  constexpr float kMax = largest(Format::e4m3);
  const float base = amax / 6.0f * g.encode;
  const Nvfp4Scale four = nvfp4_scale(std::min(base * 1.5f, kMax), g), six = nvfp4_scale(std::min(base, kMax), g);
  float error_four[kNvfp4Block] = {}, error_six[kNvfp4Block] = {};
  for (int64_t i = 0; i < count; ++i) {
    error_four[i] = four_over_six_error(spec, values + i * kLineStride, four, g.amax);
    error_six[i] = four_over_six_error(spec, values + i * kLineStride, six, g.amax);
  }
  return tree_sum(error_four) < tree_sum(error_six) ? four : six;
}

/// Where the draw of a line's first block stands; those of the next blocks follow.
struct Draw {
  uint64_t seed, offset, block;
};

/// E2M1 codes of `blocks` blocks (numerics.md 5.6, 0.11).
[[gnu::flatten]] inline void encode_stochastic(const float* values, int64_t blocks, const Draw& draw, uint8_t* codes) {
  alignas(64) uint8_t random[kTile];
  for (int64_t b = 0; b < blocks; ++b) {
    const std::array<uint32_t, 4> words = philox(draw.seed, draw.offset, draw.block + static_cast<uint64_t>(b));
    for (int j = 0; j < kNvfp4Block; ++j) random[b * kNvfp4Block + j] = random_byte(words, j);
  }
  for (int64_t j = 0; j < blocks * kNvfp4Block; ++j) codes[j] = encode_e2m1_stochastic(values[j], random[j]);
}
