// Quantization and dequantization of 4096 x 4096 and of the few rows of inference.
#include "quire/operations/operations.h"

#include <array>

#include "core/measure.h"

namespace quire::bench {
namespace {

constexpr std::array<std::string_view, 17> kSpecs{"fp8_tensor:given",
                                                  "fp8_tensor",
                                                  "fp8_row",
                                                  "fp8_block",
                                                  "fp8_block:128x128",
                                                  "mxfp8",
                                                  "mxfp8:32x32",
                                                  "mxfp8:swizzled",
                                                  "mxfp4",
                                                  "nvfp4",
                                                  "nvfp4:16x16",
                                                  "nvfp4:rht",
                                                  "nvfp4:sr",
                                                  "nvfp4:rht:sr",
                                                  "nvfp4:row_scaled",
                                                  "nvfp4:4over6=mse",
                                                  "nvfp4:swizzled"};
constexpr std::array<DType, 3> kDTypes{DType::f32, DType::f16, DType::bf16};
constexpr std::array<std::string_view, 3> kDirections{"rowwise", "columnwise", "both"};
constexpr std::string_view kGiven = ":given";

struct Case {
  std::string_view name;
  DType dtype;
  bool rowwise, columnwise;
  int64_t rows, cols;

  bool given() const { return name.ends_with(kGiven); }
  QuantSpec spec() const { return QuantSpec::parse(given() ? name.substr(0, name.size() - kGiven.size()) : name); }
};

/// Memory of the buffers of one direction.
struct SideMemory {
  Memory data, scale, amax;

  SideMemory(const Case& c, Direction direction)
      : SideMemory(buffers<int64_t>(c.spec(), {c.rows, c.cols}, direction)) {}
  Side view() const { return {data.get(), scale.get(), reinterpret_cast<float*>(amax.get())}; }
  int64_t size() const { return data.size() + scale.size() + amax.size(); }

 private:
  static Memory memory(const Buffer<int64_t>& b) {
    return Memory(product(b.sizes, 0, b.sizes.size()) * size_of(b.dtype));
  }
  explicit SideMemory(const Buffers<int64_t>& b) : data(memory(b.data)), scale(memory(b.scale)), amax(memory(b.amax)) {}
};

constexpr float kScale = 100.0f;

QuantizeProblem problem_of(const Case& c, const Memory& x, const SideMemory& rowwise, const SideMemory& columnwise) {
  QuantizeProblem p;
  p.spec = c.spec();
  p.x = {x.get(), c.dtype, c.rows, c.cols, c.cols};
  if (c.rowwise) p.rowwise = rowwise.view();
  if (c.columnwise) p.columnwise = columnwise.view();
  p.random = {1, 2, 3};
  if (c.given()) p.scale = &kScale;
  return p;
}

void run_quantize(benchmark::State& state, int64_t threads, const Case& c) {
  const SideMemory sample_rows(c, Direction::rowwise), sample_columns(c, Direction::columnwise);
  const int64_t read = c.rows * c.cols * size_of(c.dtype);
  const int64_t written = (c.rowwise ? sample_rows.size() : 0) + (c.columnwise ? sample_columns.size() : 0);
  std::vector<Memory> x;
  std::vector<SideMemory> rowwise, columnwise;
  for (int64_t i = 0; i < copies(read + written); ++i) {
    x.push_back(normal_values(c.dtype, c.rows * c.cols));
    rowwise.emplace_back(c, Direction::rowwise);
    columnwise.emplace_back(c, Direction::columnwise);
  }
  const std::string rows = explain(problem_of(c, x[0], rowwise[0], columnwise[0]));
  state.SetLabel(rows.substr(0, rows.find(':')));
  measure(state, threads, {read, written}, [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    quantize(problem_of(c, x[at], rowwise[at], columnwise[at]));
  });
}

void run_dequantize(benchmark::State& state, int64_t threads, const Case& c) {
  const Direction direction = c.rowwise ? Direction::rowwise : Direction::columnwise;
  const int64_t tokens = c.rowwise ? c.rows : columnwise_tokens(c.spec(), c.rows);
  const int64_t outer = c.rowwise ? c.rows : c.cols, contraction = c.rowwise ? c.cols : tokens;
  const int64_t written = outer * contraction * size_of(c.dtype);
  const Memory x = normal_values(DType::f32, c.rows * c.cols);
  Case source = c;
  source.dtype = DType::f32;
  std::vector<SideMemory> sides;
  std::vector<Memory> out;
  const int64_t read = SideMemory(c, direction).size();
  for (int64_t i = 0; i < copies(read + written); ++i) {
    sides.emplace_back(c, direction);
    out.emplace_back(written);
    quantize(problem_of(source, x, sides.back(), sides.back()));
  }
  measure(state, threads, {read, written}, [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    const Side side = sides[at].view();
    dequantize({.spec = c.spec(),
                .direction = direction,
                .rows = c.rows,
                .cols = c.cols,
                .data = side.data,
                .scale = side.scale,
                .amax = side.amax,
                .out = {out[at].get(), c.dtype, outer, contraction, contraction}});
  });
}

std::string name_of(const Case& c, std::string_view operation) {
  const std::string_view direction = kDirections[c.rowwise ? c.columnwise ? 2 : 0 : 1];
  return std::string(operation) + "/" + std::string(c.name) + "/" + std::string(direction) + "/" +
         std::string(name(c.dtype)) + "/" + std::to_string(c.rows) + "x" + std::to_string(c.cols);
}

}  // namespace

void add_quantize() {
  for (const std::array<int64_t, 2> size : {std::array<int64_t, 2>{4096, 4096}, {16, 4096}, {1, 4096}})
    for (const std::string_view spec : kSpecs)
      for (const DType dtype : kDTypes)
        for (const int directions : {1, 2, 3}) {
          const Case c{spec, dtype, (directions & 1) != 0, (directions & 2) != 0, size[0], size[1]};
          add(name_of(c, "quantize"), [c](benchmark::State& s, int64_t threads) { run_quantize(s, threads, c); });
        }
}

void add_dequantize() {
  for (const std::string_view spec : kSpecs)
    for (const DType dtype : kDTypes)
      for (const bool rowwise : {true, false}) {
        if (spec.ends_with(kGiven) || spec.find(":sr") != spec.npos || spec.find(":4") != spec.npos) continue;
        const Case c{spec, dtype, rowwise, !rowwise, 4096, 4096};
        add(name_of(c, "dequantize"), [c](benchmark::State& s, int64_t threads) { run_dequantize(s, threads, c); });
      }
}

}  // namespace quire::bench
