#include "quire/cuda/skinny.h"

#include <algorithm>

#include "quire/cuda/cublaslt_product.h"
#include "quire/cuda/grouped.h"
#include "quire/cuda/kernels/skinny.h"
#include "quire/spec/product.h"

namespace quire::cuda {
namespace {

constinit const Kernel kCodes{"skinny_rows", "skinny_codes"}, kPlain{"skinny_rows", "skinny_plain"};
constinit const Kernel kFinish{"skinny", "skinny_finish"};

/// Of one kind of weights, by rows.
struct KernelPair {
  Kernel narrow, wide;
};
constinit const KernelPair kF32{{"skinny", "skinny_f32_16"}, {"skinny", "skinny_f32_64"}};
constinit const KernelPair kE8m0{{"skinny", "skinny_e8m0_16"}, {"skinny", "skinny_e8m0_64"}};
constinit const KernelPair kPackedE8m0{{"skinny", "skinny_packed_e8m0_16"}, {"skinny", "skinny_packed_e8m0_64"}};
constinit const KernelPair kTwoLevel{{"skinny", "skinny_two_level_16"}, {"skinny", "skinny_two_level_64"}};

const KernelPair& kernels_of(const QuantSpec& w) {
  switch (w.row().scale) {
    case ScaleKind::f32:
      return kF32;
    case ScaleKind::two_level:
      return kTwoLevel;
    default:
      return w.packed() ? kPackedE8m0 : kE8m0;
  }
}

/// What is asked of the contraction of a product, and of its columns.
struct Columns {
  const Operand& w;
  int64_t contraction;

  bool are_refused(Refusal* refusal) const {
    constexpr int64_t longest = int64_t{1} << 28;
    if (!w.spec.packed() && w.spec.element != Format::e4m3)
      return refused(refusal, "decodes E4M3 and E2M1 in columns, but they are ", w.spec);
    if (w.spec.interleaved || blocks_first(w.spec, w.direction))
      return refused(refusal, "reads the codes of a column one after another, but those of ", w.spec,
                     w.spec.interleaved ? " are interleaved" : " columnwise lie across");
    const int64_t bytes = w.spec.packed() ? ceil_div(contraction, int64_t{2}) : contraction;
    if (contraction == 0 || contraction >= longest || bytes % 16 != 0)
      return refused(refusal, "reads columns by 16 bytes, below 2^28 codes, but they have ", bytes, " bytes");
    return !are_aligned() && refused(refusal, "reads columns by 16 bytes, but their memory is not aligned to as many");
  }

 private:
  bool are_aligned() const {
    const auto aligned = [&](const void* data, const void* scale) {
      const uintptr_t unit = w.spec.row().scale == ScaleKind::f32 ? 4 : 2;
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && reinterpret_cast<uintptr_t>(scale) % unit == 0;
    };
    if (w.each.empty()) return aligned(w.data, w.scale);
    return std::ranges::all_of(w.each, [&](const Side& side) { return aligned(side.data, side.scale); });
  }
};

bool refuses_rows(const RowGroups& groups, int64_t rows, Refusal* refusal) {
  return skinny_kernel(groups, rows) == SkinnyKernel::none &&
         refused(refusal, "takes at most ", kWideRows, " rows of a, or ", kNarrowRows,
                 " for each group on average, but a has ", rows);
}

/// Memory for rows of x, which a kernel writes next.
SkinnyRows room_for(const Places& groups, int64_t contraction, bool cut_scales, const Context& context) {
  const int64_t tiles = skinny_tile_of(groups.count, groups.rows), cuts = ceil_div(contraction, kLongestCut);
  SkinnyRows x{.numbers = lend<std::byte>(context, times(times(tiles, cuts), kSkinnyRows * kLongestCut * 2)),
               .factors = lend<float>(context, tiles * kSkinnyRows)};
  if (cut_scales) x.cut_scales = lend<float>(context, times(times(tiles, cuts), kSkinnyRows));
  return x;
}

/// A thread for each 16 bytes of the rows.
Grid grid_of_rows(const Places& groups, int64_t contraction) {
  const int64_t tiles = ceil_div(ceil_div(groups.rows, std::max<int64_t>(groups.count, 1)), kSkinnyRows);
  return with_groups(grid_of(tiles * ceil_div(contraction, kLongestCut) * kSkinnyUnits * 32), groups.count);
}

/// The products, of rows that are there.
void multiply(SkinnyJob job, SkinnyKernel kernel, const Context& context) {
  const KernelPair& kernels = kernels_of(job.w.all.spec);
  const int64_t columns = job.out.all.cols, count = job.groups.count;
  if (kernel == SkinnyKernel::narrow) {
    const Grid grid = grid_of(ceil_div(columns, kSkinnyColumns) * kSkinnyThreads, kSkinnyThreads);
    launch(kernels.narrow, with_groups(grid, count), job, context);
    return;
  }
  job.parts = lend<float>(context, times(kSkinnyParts * job.groups.rows, columns));
  const Grid grid = grid_of(ceil_div(columns, kWideColumns) * kSkinnyParts * kSkinnyThreads, kSkinnyThreads);
  launch(kernels.wide, with_groups(grid, count), job, context);
  launch(kFinish, with_groups(grid_of(job.groups.rows * columns), count), job, context);
}

}  // namespace

SkinnyKernel skinny_kernel(const RowGroups& groups, int64_t rows) {
  if (ceil_div(rows, std::max<int64_t>(groups.count, 1)) <= kNarrowRows) return SkinnyKernel::narrow;
  return rows <= kWideRows ? SkinnyKernel::wide : SkinnyKernel::none;
}

bool refuses_skinny(const GemmProblem& p, const Context& context, Refusal* refusal) {
  if (p.a.direction != Direction::rowwise || p.b.groups.ends.data)
    return refused(refusal, "takes groups of rows of a, but they are of the contraction");
  if (refuses_rows(p.a.groups, p.a.outer, refusal) || Columns{p.b, p.a.contraction}.are_refused(refusal)) return true;
  const bool wide = skinny_kernel(p.a.groups, p.a.outer) == SkinnyKernel::wide;
  return wide && !refuses_cublaslt(p, context, nullptr) &&
         refused(refusal, "leaves more than ", kNarrowRows, " rows to cublaslt, which is faster there");
}

void multiply_skinny(const GemmProblem& p, const Context& context) {
  const GroupedOperand x = on_device(p.a, context);
  const bool cut_scales = p.a.spec.row().scope == Scope::block && !has_byte_scales(p.a.spec);
  SkinnyJob job{.w = on_device(p.b, context),
                .groups = x.groups,
                .out = on_device(p, {p.bias, p.bias_dtype}, context),
                .x = room_for(x.groups, p.a.contraction, cut_scales, context),
                .constant = product_constant(p.a.spec, p.b.spec)};
  job.out.addend = p.addend;
  if (!p.addend && p.outs.empty()) zero_beyond(p.out, job.groups, context);
  launch(kCodes, grid_of_rows(x.groups, p.a.contraction), SkinnyCodesJob{x, job.x}, context);
  multiply(job, skinny_kernel(p.a.groups, p.a.outer), context);
}

bool refuses_skinny(const MatmulProblem& p, const Context&, Refusal* refusal) {
  if (!p.codes) return refused(refusal, "takes weights in codes");
  if (p.transpose_a || !p.transpose_b)
    return refused(refusal, "reads the terms of an output along rows of a and of b, but they lie across them");
  if (p.a.dtype != DType::bf16 || p.out.dtype == DType::f16)
    return refused(refusal, "multiplies rows in bfloat16, to bfloat16 or float32, but a is ", name(p.a.dtype),
                   " and the result ", name(p.out.dtype));
  return refuses_rows(p.groups, p.a.rows, refusal) || Columns{*p.codes, p.a.cols}.are_refused(refusal);
}

void multiply_skinny(const MatmulProblem& p, const Context& context) {
  const Places groups = place_groups(p.groups, p.a.rows, context);
  SkinnyJob job{.w = on_device(*p.codes, context),
                .groups = groups,
                .out = on_device(p, p.bias, context),
                .x = room_for(groups, p.a.cols, false, context),
                .constant = product_constant({}, p.codes->spec),
                .plain = true};
  if (p.outs.empty()) zero_beyond(p.out, groups, context);
  launch(kPlain, grid_of_rows(groups, p.a.cols), SkinnyPlainJob{p.a, groups, job.x}, context);
  multiply(job, skinny_kernel(p.groups, p.a.rows), context);
}

}  // namespace quire::cuda
