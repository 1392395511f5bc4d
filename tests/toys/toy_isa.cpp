// Problems that go the ordinary way, by dispatch, to the instruction set that QUIRE_ISA names. What they give is
// compared with the reference: bytes and decoded values are the same, products within their bound.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "quire/info/info.h"
#include "quire/operations/operations.h"
#include "quire/reference/gemm.h"
#include "quire/reference/quantize.h"
#include "quire/spec/buffers.h"

namespace {

using namespace quire;

constexpr int64_t kRows = 37, kCols = 208;

struct Stored {
  std::vector<uint8_t> data = std::vector<uint8_t>(kRows * kCols), scale = data;
  std::vector<float> amax = std::vector<float>(kRows);
  Side side() { return {data.data(), scale.data(), amax.data()}; }
  bool operator==(const Stored&) const = default;
};

std::vector<float> inputs() {
  std::vector<float> x(kRows * kCols);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = std::sin(static_cast<float>(i)) * std::exp2(static_cast<float>(i * 7 % 23) - 11);
  return x;
}

bool is_right(const char* text) {
  const QuantSpec spec = QuantSpec::parse(text);
  const std::vector<float> x = inputs();
  Stored codes, expected;
  QuantizeProblem quantization{.spec = spec,
                               .x = {x.data(), DType::f32, kRows, kCols, kCols},
                               .rowwise = codes.side(),
                               .columnwise = {},
                               .random = {}};
  quantize(quantization);
  quantization.rowwise = expected.side();
  reference::quantize(quantization);

  std::vector<float> values(x.size()), right = values;
  DequantizeProblem decoding{.spec = spec,
                             .rows = kRows,
                             .cols = kCols,
                             .data = codes.data.data(),
                             .scale = codes.scale.data(),
                             .amax = codes.amax.data(),
                             .out = {values.data(), DType::f32, kRows, kCols, kCols}};
  dequantize(decoding);
  decoding.out.data = right.data();
  reference::dequantize(decoding);

  std::vector<float> y(kRows * kRows), sums = y;
  GemmProblem product;
  product.a = product.b = {.spec = spec,
                           .outer = kRows,
                           .contraction = kCols,
                           .data = codes.data.data(),
                           .scale = codes.scale.data(),
                           .amax = codes.amax.data()};
  product.out = {y.data(), DType::f32, kRows, kRows, kRows};
  gemm(product);
  product.out.data = sums.data();
  reference::gemm(product);
  bool near = true;
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kRows; ++j) {
      double magnitude = 0;
      for (int64_t l = 0; l < kCols; ++l)
        magnitude += std::fabs(static_cast<double>(right[static_cast<size_t>(i * kCols + l)]) *
                               static_cast<double>(right[static_cast<size_t>(j * kCols + l)]));
      const auto at = static_cast<size_t>(i * kRows + j);
      near &= std::fabs(static_cast<double>(y[at]) - static_cast<double>(sums[at])) <=
              2 * (kCols + 6) * 0x1p-24 * magnitude;
    }
  return codes == expected && values == right && near;
}

}  // namespace

int main() {
  std::puts(isa_in_use().c_str());
  for (const char* spec : {"fp8_tensor", "fp8_row:e5m2", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "nvfp4:4over6=mae"})
    if (!is_right(spec)) std::puts(spec);
  std::puts("right");
}
