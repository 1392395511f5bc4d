// Formats that the tree does not have, by kernels that do not know them. test_toys.py compiles this file and the tree's
// sources with one more row of formats and one more option for each; what they compute is compared with rounding in
// double that shares nothing with them.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "quire/cpu/kernels.h"
#include "quire/reference/gemm.h"
#include "quire/reference/quantize.h"
#include "quire/spec/buffers.h"

namespace {

using namespace quire;

/// What the test knows of a format, in its own words: fraction bits, the exponent of the least normal number, the
/// largest number.
struct Grid {
  std::string name;
  int fraction, least;
  double largest;
};
const std::array kGrids{Grid{"e3m4", 4, -2, 15.5}, Grid{"e3m2", 2, -2, 28}, Grid{"e2m3", 3, 0, 7.5},
                        Grid{"e5m2", 2, -14, 57344}};

/// To the nearest number of the grid, ties to the even one; the largest beyond it.
double rounded(const Grid& grid, double x) {
  if (x == 0) return 0;
  const double step = std::ldexp(1.0, std::max(std::ilogb(x), grid.least) - grid.fraction);
  return std::clamp(std::nearbyint(x / step) * step, -grid.largest, grid.largest);
}

constexpr int64_t kRows = 64, kCols = 160;

/// Numbers of many magnitudes, and some that lie between two of the grid.
std::vector<float> inputs(const Grid& grid) {
  std::vector<float> x(kRows * kCols);
  uint64_t state = 1;
  for (float& value : x) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const double fraction = static_cast<double>(state >> 40) * 0x1p-24, sign = state >> 39 & 1 ? -1 : 1;
    const int exponent = static_cast<int>(state >> 33 & 15) - 12;
    value = static_cast<float>(sign * std::ldexp(1 + fraction, exponent));
    if (state >> 30 & 1) value = static_cast<float>(rounded(grid, static_cast<double>(value)) * 1.0625);
  }
  x[0] = static_cast<float>(grid.largest), x[1] = 0;
  return x;
}

void require(bool right, const std::string& what) {
  if (right) return;
  std::printf("wrong: %s\n", what.c_str());
  std::exit(1);
}

struct Stored {
  std::vector<uint8_t> data, scale;
  float amax = 0;
  Side side() { return {data.data(), scale.data(), &amax}; }
};

Stored memory_of(const QuantSpec& spec, Direction d) {
  const Buffers<int64_t> b = buffers<int64_t>(spec, {kRows, kCols}, d);
  const auto bytes = [](const Buffer<int64_t>& buffer) {
    return std::vector<uint8_t>(
        static_cast<size_t>(product(buffer.sizes, 0, buffer.sizes.size()) * size_of(buffer.dtype)));
  };
  return {bytes(b.data), bytes(b.scale)};
}

using Quantize = void (*)(const QuantizeProblem&);

std::array<Stored, 2> quantized(Quantize run, const QuantSpec& spec, const std::vector<float>& x) {
  std::array both{memory_of(spec, Direction::rowwise), memory_of(spec, Direction::columnwise)};
  run({.spec = spec,
       .x = {x.data(), DType::f32, kRows, kCols, kCols},
       .rowwise = both[0].side(),
       .columnwise = both[1].side(),
       .random = {}});
  return both;
}

using Dequantize = void (*)(const DequantizeProblem&);

std::vector<float> decoded(Dequantize run, const QuantSpec& spec, Direction d, Stored& from) {
  const bool rowwise = d == Direction::rowwise;
  std::vector<float> out(kRows * kCols);
  const int64_t rows = rowwise ? kRows : kCols, cols = rowwise ? kCols : kRows;
  run({.spec = spec,
       .direction = d,
       .rows = kRows,
       .cols = kCols,
       .data = from.data.data(),
       .scale = from.scale.data(),
       .amax = &from.amax,
       .out = {out.data(), DType::f32, rows, cols, cols}});
  return out;
}

/// What a spec stands for, with scales found here: one of the tensor, or powers of two of 32 neighbours.
std::vector<float> expected(const Grid& grid, bool one_scale, Direction d, const std::vector<float>& x) {
  const int64_t outer = d == Direction::rowwise ? kRows : kCols, along = d == Direction::rowwise ? kCols : kRows;
  const auto at = [&](int64_t o, int64_t l) {
    return x[static_cast<size_t>(d == Direction::rowwise ? o * kCols + l : l * kCols + o)];
  };
  std::vector<float> out(x.size());
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t begin = 0; begin < along; begin += 32) {
      float amax = 0;
      for (int64_t l = begin; l < begin + 32; ++l) amax = std::max(amax, std::fabs(at(o, l)));
      int exponent = 0;
      const double wanted = std::frexp(static_cast<double>(amax * (1 / static_cast<float>(grid.largest))), &exponent);
      if (wanted == 0.5) --exponent;
      const float all = std::fabs(
          *std::max_element(x.begin(), x.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
      const float by = one_scale ? static_cast<float>(grid.largest) / all : std::ldexp(1.0f, -exponent);
      for (int64_t l = begin; l < begin + 32; ++l)
        out[static_cast<size_t>(o * along + l)] =
            static_cast<float>(rounded(grid, static_cast<double>(at(o, l) * by))) * (1 / by);
    }
  return out;
}

void check_product(const char* text, void (*gemm)(const GemmProblem&), const std::vector<float>& x, const char* name) {
  const QuantSpec spec = QuantSpec::parse(text);
  Stored codes = std::move(quantized(reference::quantize, spec, x)[0]);
  const std::vector<float> values = decoded(reference::dequantize, spec, Direction::rowwise, codes);
  std::vector<float> y(kRows * kRows);
  GemmProblem p;
  p.a = p.b = {.spec = spec,
               .direction = Direction::rowwise,
               .outer = kRows,
               .contraction = kCols,
               .data = codes.data.data(),
               .scale = codes.scale.data(),
               .amax = &codes.amax};
  p.out = {y.data(), DType::f32, kRows, kRows, kRows};
  gemm(p);
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kRows; ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t l = 0; l < kCols; ++l) {
        const double term = static_cast<double>(values[static_cast<size_t>(i * kCols + l)]) *
                            static_cast<double>(values[static_cast<size_t>(j * kCols + l)]);
        sum += term, magnitude += std::fabs(term);
      }
      const double error = std::fabs(static_cast<double>(y[static_cast<size_t>(i * kRows + j)]) - sum);
      require(error <= (kCols + 6) * 0x1p-24 * magnitude, std::string(name) + " product of " + text);
    }
}

void check(const char* name, const cpu::Kernels& kernels, const Grid& grid, const std::string& family) {
  const std::string text = family + ":" + grid.name;
  const QuantSpec spec = QuantSpec::parse(text);
  require(spec.to_string() == text, "canonical text of " + text);
  const std::vector<float> x = inputs(grid);
  std::array by_kernel = quantized(kernels.quantize, spec, x), by_reference = quantized(reference::quantize, spec, x);
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    Stored &codes = by_kernel[static_cast<size_t>(d)], &right = by_reference[static_cast<size_t>(d)];
    require(codes.data == right.data && codes.scale == right.scale, std::string(name) + " bytes of " + text);
    const std::vector<float> values = decoded(kernels.dequantize, spec, d, codes);
    require(values == decoded(reference::dequantize, spec, d, codes), std::string(name) + " values of " + text);
    if (family == "fp8_tensor" || family == "mxfp8")
      require(values == expected(grid, family == "fp8_tensor", d, x), std::string(name) + " model of " + text);
  }
  check_product(text.c_str(), kernels.gemm, x, name);
  check_product((text + ":interleaved").c_str(), kernels.gemm, x, name);
}

}  // namespace

int main() {
  int checked = 0;
  const auto check_all = [&](const char* name, const cpu::Kernels& kernels) {
    for (const Grid& grid : kGrids)
      for (const char* family : {"fp8_tensor", "fp8_row", "fp8_block", "mxfp8"}) {
        check(name, kernels, grid, family);
        ++checked;
      }
  };
  check_all("scalar", cpu::scalar::kKernels);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    check_all("avx2", cpu::avx2::kKernels);
#endif
  std::printf("%d right\n", checked);
}
