#include "quire/cuda/tiles.h"

#include <algorithm>
#include <limits>

#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/tiles.h"
#include "quire/cuda/sides.h"

namespace quire::cuda {
namespace {

/// Text that a template takes.
template <size_t kSize>
struct Text {
  char text[kSize]{};

  consteval Text(const char (&from)[kSize]) { std::copy_n(from, kSize, text); }
  consteval Text() = default;
};

template <Text kFirst, Text kSecond>
consteval auto joined() {
  Text<sizeof kFirst.text + sizeof kSecond.text - 1> all;
  std::copy_n(kFirst.text, sizeof kFirst.text - 1, all.text);
  std::copy_n(kSecond.text, sizeof kSecond.text, all.text + sizeof kFirst.text - 1);
  return all;
}
template <Text kFirst, Text kSecond>
constexpr auto kJoined = joined<kFirst, kSecond>();

/// Kernels of f32, f16 and bf16.
using OfDTypes = std::array<Kernel, 3>;
template <Text kModule, Text kName>
constinit const OfDTypes kOfDTypes{{{kModule.text, kJoined<kName, "_f32">.text},
                                    {kModule.text, kJoined<kName, "_f16">.text},
                                    {kModule.text, kJoined<kName, "_bf16">.text}}};

const Kernel& of_dtype(const OfDTypes& kernels, DType dtype) {
  return kernels[dtype == DType::f32 ? 0 : dtype == DType::f16 ? 1 : 2];
}

/// What of a spec is compiled into its kernels.
struct TileKernels {
  QuantSpec spec;
  const OfDTypes& kernels;

  bool take(const QuantSpec& s) const {
    return s.family == spec.family && s.element == spec.element && s.square == spec.square &&
           s.row_scaled == spec.row_scaled && s.hadamard == spec.hadamard && s.stochastic == spec.stochastic &&
           (s.four_over_six == FourOverSix::off) == (spec.four_over_six == FourOverSix::off);
  }
};

constexpr QuantSpec fp8(Family family, Format element, bool square = false) {
  return {.family = family, .element = element, .square = square};
}
constexpr QuantSpec fp4(Family family, Hadamard hadamard = Hadamard::off, bool stochastic = false) {
  return {.family = family, .element = Format::e2m1, .hadamard = hadamard, .stochastic = stochastic};
}
/// By either error.
constexpr QuantSpec four_over_six(bool square = false, bool row_scaled = false) {
  return {.family = Family::nvfp4,
          .element = Format::e2m1,
          .square = square,
          .row_scaled = row_scaled,
          .four_over_six = FourOverSix::mae};
}

constinit const TileKernels kTileKernels[] = {
    {fp8(Family::fp8_tensor, Format::e4m3), kOfDTypes<"tiles_fp8", "fp8_tensor">},
    {fp8(Family::fp8_tensor, Format::e5m2), kOfDTypes<"tiles_fp8", "fp8_tensor_e5m2">},
    {fp8(Family::fp8_row, Format::e4m3), kOfDTypes<"tiles_fp8", "fp8_row">},
    {fp8(Family::fp8_row, Format::e5m2), kOfDTypes<"tiles_fp8", "fp8_row_e5m2">},
    {fp8(Family::fp8_block, Format::e4m3), kOfDTypes<"tiles_fp8", "fp8_block">},
    {fp8(Family::fp8_block, Format::e5m2), kOfDTypes<"tiles_fp8", "fp8_block_e5m2">},
    {fp8(Family::fp8_block, Format::e4m3, true), kOfDTypes<"tiles_fp8", "fp8_block_2d">},
    {fp8(Family::fp8_block, Format::e5m2, true), kOfDTypes<"tiles_fp8", "fp8_block_2d_e5m2">},
    {fp8(Family::mxfp8, Format::e4m3), kOfDTypes<"tiles_fp8", "mxfp8">},
    {fp8(Family::mxfp8, Format::e5m2), kOfDTypes<"tiles_fp8", "mxfp8_e5m2">},
    {fp8(Family::mxfp8, Format::e4m3, true), kOfDTypes<"tiles_fp8", "mxfp8_2d">},
    {fp8(Family::mxfp8, Format::e5m2, true), kOfDTypes<"tiles_fp8", "mxfp8_2d_e5m2">},
    {fp4(Family::mxfp4), kOfDTypes<"tiles_fp4", "mxfp4">},
    {fp4(Family::nvfp4), kOfDTypes<"tiles_fp4", "nvfp4">},
    {{.family = Family::nvfp4, .element = Format::e2m1, .square = true}, kOfDTypes<"tiles_fp4", "nvfp4_2d">},
    {{.family = Family::nvfp4, .element = Format::e2m1, .row_scaled = true}, kOfDTypes<"tiles_fp4", "nvfp4_row">},
    {four_over_six(), kOfDTypes<"tiles_fp4", "nvfp4_4over6">},
    {four_over_six(true), kOfDTypes<"tiles_fp4", "nvfp4_2d_4over6">},
    {four_over_six(false, true), kOfDTypes<"tiles_fp4", "nvfp4_row_4over6">},
    {fp4(Family::nvfp4, Hadamard::off, true), kOfDTypes<"tiles_fp4", "nvfp4_sr">},
    {fp4(Family::nvfp4, Hadamard::signs), kOfDTypes<"tiles_fp4", "nvfp4_rht">},
    {fp4(Family::nvfp4, Hadamard::signs, true), kOfDTypes<"tiles_fp4", "nvfp4_rht_sr">},
};

const TileKernels* kernels_of(const QuantSpec& spec) {
  for (const TileKernels& row : kTileKernels)
    if (row.take(spec)) return &row;
  return nullptr;
}

/// Tiles of groups at most, however their rows are divided.
int64_t tiles_of(const Matrix& x, const RowGroups& groups) {
  const int64_t down = is_one(groups) ? ceil_div(x.rows, kTile) : x.rows / kTile + groups.count;
  return down * ceil_div(x.cols, kTile);
}

bool refuses_sizes(const Matrix& x, const RowGroups& groups, Refusal* refusal) {
  if (x.rows == 0 || x.cols == 0) return refused(refusal, "takes tensors with elements, but x is empty");
  return tiles_of(x, groups) > std::numeric_limits<int32_t>::max() &&
         refused(refusal, "takes as many tiles as a launch has blocks, but x has ", tiles_of(x, groups));
}

/// keeps: whether blocks of threads keep their tiles, for columns or squares.
Grid grid_of_tiles(const Matrix& x, const RowGroups& groups, bool keeps) {
  return {.blocks = static_cast<unsigned>(tiles_of(x, groups)),
          .threads = kTileThreads,
          .shared_bytes = keeps ? tile_bytes(x.dtype) : 0};
}

/// Launches what measures amaxes of a matrix; a null pointer is not measured.
void measure(TileAmaxJob job, const RowGroups& groups, const Context& context) {
  for (uint32_t* const to : {job.plain, job.transformed})
    fill(to, 0, groups.count * static_cast<int64_t>(sizeof(uint32_t)), context);
  if (job.plain || job.transformed)
    launch(of_dtype(kOfDTypes<"tile_amax", "amax">, job.x.dtype),
           grid_of_tiles(job.x, groups, job.transformed != nullptr), job, context);
}

bool transforms(const QuantSpec& spec, Direction direction) {
  return direction == Direction::columnwise && spec.hadamard != Hadamard::off;
}

/// Whether amaxes are wanted before codes are written. A scale that is known needs none, unless it is NaN where x is
/// not finite: then they are measured by the kernel that writes the codes.
bool measures_before(const QuantizeProblem& p, Direction direction) {
  if (!is_present(side_of(p, direction)) || p.amax.of(direction)) return false;
  if (amax_count<int64_t>(p.spec, 1) == 0) return false;
  return !p.scale || (p.spec.nan && p.spec.row().scope == Scope::tensor);
}

/// Measures amaxes of lines; a null pointer is not measured.
void measure_lines(const QuantSpec& spec, const TileAmaxJob& job, const RowGroups& groups, const Context& context) {
  for (const Direction d : kDirections)
    fill(d == Direction::rowwise ? job.rows : job.columns, 0,
         amaxes_of(spec, job.x, groups, d) * static_cast<int64_t>(sizeof(uint32_t)), context);
  if (job.rows || job.columns)
    launch(of_dtype(kOfDTypes<"tile_amax", "lines">, job.x.dtype), grid_of_tiles(job.x, groups, false), job, context);
}

/// Measures what both directions follow from, in one read.
void measure_above(const QuantizeProblem& p, TileJob& job, const Context& context) {
  const Places& groups = job.rowwise.present() ? job.rowwise.groups : job.columnwise.groups;
  TileAmaxJob amax{.x = job.x, .groups = groups, .each = job.each, .signs = p.spec.hadamard == Hadamard::signs};
  const bool lines = has_amax_per_line(p.spec);
  for (const Direction d : kDirections) {
    TileSide& side = d == Direction::rowwise ? job.rowwise : job.columnwise;
    side.amaxes = p.amax.of(d);
    if (!measures_before(p, d)) continue;
    uint32_t*& to = lines ? (d == Direction::rowwise ? amax.rows : amax.columns)
                          : (transforms(p.spec, d) ? amax.transformed : amax.plain);
    if (!to) to = lend<uint32_t>(context, amaxes_of(p.spec, job.x, p.groups, d));
    side.amaxes = reinterpret_cast<const float*>(to);
  }
  if (lines)
    measure_lines(p.spec, amax, p.groups, context);
  else
    measure(amax, p.groups, context);
}

}  // namespace

bool refuses_tiles(const QuantizeProblem& p, const Context&, Refusal* refusal) {
  const QuantSpec& s = p.spec;
  if (s.interleaved) return refused(refusal, "writes codes in the plain order, but ", s, " is interleaved");
  if (!kernels_of(s)) return refused(refusal, "no kernel is compiled for ", s);
  // A kernel is compiled for one dtype.
  if (!common_dtype(p.x, p.each)) return refused(refusal, "takes matrices in one dtype, but the list has several");
  return refuses_sizes(p.x, p.groups, refusal);
}

void quantize_tiles(const QuantizeProblem& p, const Context& context) {
  TileJob job{.spec = p.spec, .x = all_of(p), .random = p.random, .scale = p.scale, .only = p.only};
  job.each = list_on_device(p.each, context);
  for (const Direction d : kDirections) {
    if (!is_present(side_of(p, d))) continue;
    TileSide& side = d == Direction::rowwise ? job.rowwise : job.columnwise;
    side.side = side_of(p, d), side.groups = place_side(p, d, context);
  }
  if (!job.rowwise.present() && !job.columnwise.present()) return;
  measure_above(p, job, context);
  for (const TileSide* side : {&job.rowwise, &job.columnwise})
    if (side->present() && !side->amaxes && p.spec.row().scope == Scope::tensor && is_one(p.groups))
      fill(side->side.amax, 0, sizeof(float), context);
  launch(of_dtype(kernels_of(p.spec)->kernels, job.x.dtype),
         grid_of_tiles(job.x, p.groups, job.columnwise.present() || p.spec.square), job, context);
}

bool refuses_amax_tiles(const AmaxProblem& p, const Context&, Refusal* refusal) {
  if (amax_count<int64_t>(p.spec, 1) == 0)
    return refused(refusal, "takes specs with an amax, but ", p.spec, " has none");
  return refuses_sizes(p.x, p.groups, refusal);
}

void amax_tiles(const AmaxProblem& p, const Context& context) {
  TileAmaxJob job{.x = p.x, .signs = p.spec.hadamard == Hadamard::signs};
  job.groups = place_groups(p.groups, p.x.rows, context);
  auto* const columnwise = reinterpret_cast<uint32_t*>(p.columnwise);
  if (has_amax_per_line(p.spec)) {
    job.rows = reinterpret_cast<uint32_t*>(p.rowwise), job.columns = columnwise;
    return measure_lines(p.spec, job, p.groups, context);
  }
  job.plain = reinterpret_cast<uint32_t*>(p.rowwise);
  job.transformed = transforms(p.spec, Direction::columnwise) ? columnwise : nullptr;
  measure(job, p.groups, context);
  if (columnwise && !job.transformed) measure({.x = p.x, .groups = job.groups, .plain = columnwise}, p.groups, context);
}

}  // namespace quire::cuda
