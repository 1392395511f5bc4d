// Quantizes one block of MXFP8 and decodes it again. The values are multiples of the block's scale, so nothing is lost.
#include <iostream>
#include <vector>

#include "quire/operations/operations.h"

int main() {
  constexpr int64_t kRows = 1, kCols = 32;
  std::vector<float> x(kCols), decoded(kCols);
  for (int64_t i = 0; i < kCols; ++i) x[static_cast<size_t>(i)] = static_cast<float>(i % 8) - 3.0f;

  const quire::QuantSpec spec = quire::QuantSpec::parse("mxfp8");
  std::vector<uint8_t> codes(kCols), scales(1);
  const quire::Matrix view{.data = x.data(), .rows = kRows, .cols = kCols, .row_stride = kCols};
  quire::quantize({.spec = spec, .x = view, .rowwise = {.data = codes.data(), .scale = scales.data()}});

  const quire::MutableMatrix out{.data = decoded.data(), .rows = kRows, .cols = kCols, .row_stride = kCols};
  quire::dequantize(
      {.spec = spec, .rows = kRows, .cols = kCols, .data = codes.data(), .scale = scales.data(), .out = out});
  std::cout << spec.to_string() << (decoded == x ? ": equal\n" : ": different\n");
}
