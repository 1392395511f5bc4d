// Of each kind of problem a small one. What is mixed into a kind is what its small problem follows from.
#include <algorithm>
#include <bit>
#include <initializer_list>

#include "quire/cuda/driver.h"
#include "quire/cuda/gemm.h"
#include "quire/cuda/kernels/gemm.h"
#include "quire/cuda/sides.h"
#include "quire/cuda/skinny.h"
#include "quire/cuda/trial.h"
#include "quire/spec/fingerprint_rule.h"
#include "quire/spec/sums.h"

namespace quire::cuda {
namespace {

/// Rows and columns that are more than one tile of every kernel, and end within another.
constexpr int64_t kRows = 144, kCols = 144;
/// The same of matrices whose rows or columns are summed: besides whole chunks and steps of a loop, the sums have 7
/// terms left, which loops that nvcc has unrolled take by parts of 4, 2 and 1.
constexpr int64_t kSummedRows = kColumnChunk + 7, kSummedCols = (8 + 7) * kRowSums;

uint64_t mixed_all(std::initializer_list<uint64_t> words) {
  uint64_t kind = 0;
  for (const uint64_t word : words) kind = mixed(word, kind);
  return kind;
}

template <class... Parts>
uint64_t kind(const Parts&... parts) {
  return mixed_all({static_cast<uint64_t>(parts)...});
}

/// Bits of flags, of pointers that are there.
template <class... Flags>
uint64_t bits(const Flags&... flags) {
  uint64_t all = 0;
  ((all = all * 2 + (flags ? 1 : 0)), ...);
  return all;
}

uint64_t kind(const QuantSpec& s) {
  return kind(s.family, s.element, std::bit_cast<uint32_t>(s.epsilon), s.hadamard, s.four_over_six, s.global,
              bits(s.square, s.pow2, s.row_scaled, s.stochastic, s.block_scale_max_256, s.given, s.swizzled, s.nan,
                   s.interleaved));
}

uint64_t kind(const RowGroups& groups) { return bits(!is_one(groups), groups.ends.data, groups.ends.wide); }
uint64_t kind(const Operand& o) { return kind(kind(o.spec), o.direction, kind(o.groups)); }
uint64_t kind(const Vector& v) { return kind(v.data ? 1 : 0, v.dtype); }
uint64_t kind(const Routing& r) {
  return kind(r.score, bits(r.after_topk, r.renormalize), r.topk, r.num_groups, r.group_topk, r.group_best);
}

/// x's dtype; of a list, its members'.
DType dtype_of(const QuantizeProblem& p) { return p.each.empty() ? p.x.dtype : p.each[0].dtype; }

/// Products that have few rows go to kernels of their own: how many a small product has, of each of its groups unless
/// ends say where they are. groups: of the rows, of which there are `rows` altogether.
int64_t small_rows(const RowGroups& groups, int64_t rows) {
  constexpr int64_t few = 16, some = 40, many = 72;
  const int64_t most = groups.ends.data ? rows : rows / groups.count;
  switch (skinny_kernel(groups, rows)) {
    case SkinnyKernel::narrow:
      return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(most, 1, few))));
    case SkinnyKernel::wide:
      return groups.count > 1 && !groups.ends.data ? some / 2 : some;
    default:
      return many;
  }
}
/// Of a product of a GemmProblem, whose groups are rows or the contraction.
int64_t small_rows(const GemmProblem& p) {
  return small_rows(p.a.direction == Direction::rowwise ? p.a.groups : RowGroups{}, p.a.outer);
}
int64_t small_rows(const MatmulProblem& p) {
  return p.transpose_a ? small_rows({}, p.a.cols) : small_rows(p.groups, p.a.rows);
}

/// The sizes of a product that has that many rows.
struct Sizes {
  int64_t m, n, k;
};
Sizes sizes_of(int64_t rows, const Trial& trial) {
  return trial.terms.large ? Sizes{std::max<int64_t>(rows, 128), 128, 256} : Sizes{rows, 32, 160};
}

MutableMatrix product_of(const MutableMatrix& like, Trial& trial, int64_t rows, int64_t cols) {
  return trial.output(trial.terms.wanted == Wanted::magnitude ? DType::f32 : like.dtype, rows, cols);
}

Destination plain_of(const Destination& like, Trial& trial, int64_t rows, int64_t cols) {
  return {.y = trial.output(like.y.dtype, rows, cols)};
}

}  // namespace

uint64_t kind_of(const QuantizeProblem& p) {
  return kind(kind(p.spec), dtype_of(p), kind(p.groups),
              bits(is_present(p.rowwise), is_present(p.columnwise), p.scale, p.random.state));
}

QuantizeProblem small_like(const QuantizeProblem& like, Trial& trial) {
  QuantizeProblem p;
  p.spec = like.spec, p.x = trial.matrix(dtype_of(like), kRows, kCols), p.random.seed = 1;
  p.groups = trial.groups(like.groups, kRows);
  if (like.scale) p.scale = static_cast<const float*>(trial.values(DType::f32, p.groups.count, true));
  for (const Direction d : kDirections) {
    if (!is_present(side_of(like, d))) continue;
    const BufferCounts<int64_t> count = is_one(p.groups)
                                            ? counts(buffers<int64_t>(p.spec, {kRows, kCols}, d))
                                            : grouped_counts<int64_t>(p.spec, {kRows, kCols, p.groups.count}, d);
    (d == Direction::rowwise ? p.rowwise : p.columnwise) = trial.side(count, p.spec, true);
    (d == Direction::rowwise ? p.room.rowwise : p.room.columnwise) = count;
  }
  return p;
}

uint64_t kind_of(const AmaxProblem& p) {
  return kind(kind(p.spec), p.x.dtype, kind(p.groups), bits(p.rowwise, p.columnwise));
}

AmaxProblem small_like(const AmaxProblem& like, Trial& trial) {
  AmaxProblem p{.spec = like.spec, .x = trial.matrix(like.x.dtype, kRows, kCols)};
  p.groups = trial.groups(like.groups, kRows);
  for (const Direction d : kDirections) {
    float* const of_like = d == Direction::rowwise ? like.rowwise : like.columnwise;
    if (of_like)
      (d == Direction::rowwise ? p.rowwise : p.columnwise) = trial.output<float>(amaxes_of(p.spec, p.x, p.groups, d));
  }
  return p;
}

uint64_t kind_of(const DequantizeProblem& p) { return kind(kind(p.spec), p.direction, p.out.dtype, kind(p.groups)); }

DequantizeProblem small_like(const DequantizeProblem& like, Trial& trial) {
  // More codes than a warp decodes of a line at a time, and more than one square of those against memory.
  constexpr int64_t rows = 40, cols = 1096;
  const bool rowwise = like.direction == Direction::rowwise;
  const Operand from = trial.operand({.spec = like.spec, .direction = like.direction}, rowwise ? rows : cols,
                                     rowwise ? cols : rows, trial.groups(like.groups, rows));
  return {.spec = like.spec,
          .direction = like.direction,
          .rows = rows,
          .cols = cols,
          .data = from.data,
          .scale = from.scale,
          .amax = from.amax,
          .out = trial.output(like.out.dtype, from.outer, from.contraction),
          .groups = from.groups,
          .room = from.room};
}

uint64_t kind_of(const GemmProblem& p, const Context& context) {
  return kind(kind(p.a), kind(p.b), p.out.dtype, kind(Vector{p.bias, p.bias_dtype}),
              bits(p.addend, takes_large_tiles(p, context), takes_wide_tiles(p, context)), small_rows(p));
}

GemmProblem small_like(const GemmProblem& like, Trial& trial) {
  const Context& context = trial.terms.context;
  const bool large_tiles = takes_large_tiles(like, context);
  auto [rows, n, k] = sizes_of(small_rows(like), trial);
  if (large_tiles) n = kLargeTensorTile * driver().machine(context.index).multiprocessors;
  if (takes_wide_tiles(like, context)) n *= 4;
  const bool by_rows = like.a.direction == Direction::rowwise, result = trial.terms.wanted == Wanted::result;
  // Groups of a are rows of the result, or of the contraction; those of b are weights, or the same contraction.
  const int64_t m = by_rows && !is_one(like.a.groups) && (large_tiles || !like.a.groups.ends.data) ? 2 * rows : rows;
  const RowGroups tokens = trial.groups(like.a.groups, by_rows ? m : k);
  const int64_t count = tokens.count;
  GemmProblem p;
  p.a = trial.operand(like.a, m, k, tokens);
  const bool weights = by_rows && !is_one(tokens);
  const bool b_by_rows = like.b.direction == Direction::rowwise;
  const RowGroups of_b = weights ? RowGroups::equal(count, b_by_rows ? n : k) : tokens;
  p.b = trial.operand(like.b, weights && b_by_rows ? count * n : n, weights && !b_by_rows ? count * k : k, of_b);
  p.out = product_of(like.out, trial, by_rows ? m : count * m, n);
  p.bias_dtype = like.bias_dtype;
  if (like.bias && result) p.bias = trial.values(like.bias_dtype, (weights ? count : 1) * n);
  if (like.addend && result) p.addend = trial.values(like.out.dtype, p.out.rows * n);
  return p;
}

/// Of b, or of a list of them.
static DType dtype_of_b(const MatmulProblem& p) { return p.bs.empty() ? p.b.dtype : p.bs[0].dtype; }

uint64_t kind_of(const MatmulProblem& p, const Context& context) {
  const uint64_t codes = p.codes ? kind(p.codes->spec) : 0;
  return kind(p.a.dtype, dtype_of_b(p), p.out.dtype,
              bits(p.transpose_a, p.transpose_b, takes_large_tiles(p, context), takes_wide_tiles(p, context)),
              kind(p.bias), kind(p.groups), codes, small_rows(p));
}

MatmulProblem small_like(const MatmulProblem& like, Trial& trial) {
  const Context& context = trial.terms.context;
  const bool large_tiles = takes_large_tiles(like, context), positive = trial.terms.wanted == Wanted::magnitude;
  auto [rows, n, k] = sizes_of(small_rows(like), trial);
  if (large_tiles) n = kLargeTensorTile * driver().machine(context.index).multiprocessors;
  if (takes_wide_tiles(like, context)) n *= 4;
  const auto matrix = [&](DType dtype, int64_t of_rows, int64_t cols) {
    return Matrix{trial.values(dtype, of_rows * cols, positive), dtype, of_rows, cols, cols};
  };
  // Groups are rows of the result, or of the contraction.
  const bool several = !is_one(like.groups), by_rows = !like.transpose_a;
  const int64_t m = by_rows && several && (large_tiles || !like.groups.ends.data) ? 2 * rows : rows;
  MatmulProblem p;
  p.groups = trial.groups(like.groups, by_rows ? m : k);
  p.transpose_a = like.transpose_a, p.transpose_b = like.transpose_b;
  p.a = p.transpose_a ? matrix(like.a.dtype, k, m) : matrix(like.a.dtype, m, k);
  const int64_t count = p.groups.count, weights = by_rows ? count : 1;
  const int64_t b_rows = weights * (p.transpose_b ? n : k), b_cols = p.transpose_b ? k : n;
  if (like.codes) {
    p.codes =
        trial.operand(*like.codes, b_rows, b_cols, several ? RowGroups::equal(count, b_rows / count) : RowGroups{});
    p.b = {nullptr, like.b.dtype, b_rows, b_cols, b_cols};
  } else {
    p.b = matrix(dtype_of_b(like), b_rows, b_cols);
  }
  if (!positive) p.bias = trial.vector(like.bias, (several ? count : 1) * n);
  p.out = product_of(like.out, trial, by_rows ? m : count * m, n);
  return p;
}

uint64_t kind_of(const ColumnSumProblem& p) { return kind(p.x.dtype, p.out_dtype, kind(p.groups)); }

ColumnSumProblem small_like(const ColumnSumProblem& like, Trial& trial) {
  const int64_t rows = is_one(like.groups) ? kSummedRows : 2 * kSummedRows;
  ColumnSumProblem p{.x = trial.matrix(like.x.dtype, rows, kSummedCols),
                     .out_dtype = like.out_dtype,
                     .groups = trial.groups(like.groups, rows)};
  p.out = trial.output(p.out_dtype, p.groups.count * kSummedCols);
  return p;
}

uint64_t kind_of(const NormProblem& p) {
  return kind(p.kind, p.x.dtype, kind(p.gamma), kind(p.beta), p.out.y.dtype, bits(p.zero_centered, p.mean, p.rstd));
}

NormProblem small_like(const NormProblem& like, Trial& trial) {
  NormProblem p;
  p.kind = like.kind, p.x = trial.matrix(like.x.dtype, kSummedRows, kSummedCols);
  p.gamma = trial.vector(like.gamma, kSummedCols), p.beta = trial.vector(like.beta, kSummedCols);
  p.zero_centered = like.zero_centered, p.eps = 1e-5f;
  p.out = plain_of(like.out, trial, kSummedRows, kSummedCols);
  if (like.mean) p.mean = trial.output<float>(kSummedRows);
  if (like.rstd) p.rstd = trial.output<float>(kSummedRows);
  return p;
}

uint64_t kind_of(const NormGradProblem& p) {
  return kind(p.kind, p.dy.dtype, p.x.dtype, kind(p.gamma), p.dx.dtype,
              bits(p.zero_centered, p.dx.data, p.dgamma, p.dbeta));
}

NormGradProblem small_like(const NormGradProblem& like, Trial& trial) {
  NormGradProblem p;
  p.kind = like.kind;
  p.dy = trial.matrix(like.dy.dtype, kSummedRows, kSummedCols),
  p.x = trial.matrix(like.x.dtype, kSummedRows, kSummedCols);
  p.gamma = trial.vector(like.gamma, kSummedCols), p.zero_centered = like.zero_centered;
  if (p.kind == NormKind::layer) p.mean = static_cast<const float*>(trial.values(DType::f32, kSummedRows));
  p.rstd = static_cast<const float*>(trial.values(DType::f32, kSummedRows, true));
  if (like.dx.data) p.dx = trial.output(like.dx.dtype, kSummedRows, kSummedCols);
  if (like.dgamma) p.dgamma = trial.output(like.gamma.dtype, kSummedCols);
  if (like.dbeta) p.dbeta = trial.output(like.gamma.dtype, kSummedCols);
  return p;
}

uint64_t kind_of(const ActivationProblem& p) {
  return kind(p.activation.kind, p.x.dtype, p.out.y.dtype, kind(p.groups));
}

ActivationProblem small_like(const ActivationProblem& like, Trial& trial) {
  const Activation activation{.kind = like.activation.kind};
  return {.activation = activation,
          .x = trial.matrix(like.x.dtype, kRows, kCols * activation.row().inputs()),
          .out = plain_of(like.out, trial, kRows, kCols),
          .groups = trial.groups(like.groups, kRows)};
}

uint64_t kind_of(const ActivationGradProblem& p) {
  return kind(p.activation.kind, p.dy.dtype, p.x.dtype, p.dx.dtype, kind(p.groups));
}

ActivationGradProblem small_like(const ActivationGradProblem& like, Trial& trial) {
  const Activation activation{.kind = like.activation.kind};
  const int64_t cols = kCols * activation.row().inputs();
  return {.activation = activation,
          .dy = trial.matrix(like.dy.dtype, kRows, kCols),
          .x = trial.matrix(like.x.dtype, kRows, cols),
          .dx = trial.output(like.dx.dtype, kRows, cols),
          .groups = trial.groups(like.groups, kRows)};
}

uint64_t kind_of(const RouteProblem& p) { return kind(kind(p.routing), p.logits.dtype, p.logits.cols, bits(p.bias)); }

/// The routing without what is a plain factor at its end.
static Routing unscaled(Routing routing) {
  routing.scaling_factor = 1;
  return routing;
}

RouteProblem small_like(const RouteProblem& like, Trial& trial) {
  constexpr int64_t tokens = 37;
  RouteProblem p{.routing = unscaled(like.routing),
                 .logits = trial.matrix(like.logits.dtype, tokens, like.logits.cols)};
  if (like.bias) p.bias = static_cast<const float*>(trial.values(DType::f32, p.logits.cols));
  p.weights = trial.output<float>(tokens * p.routing.topk);
  p.ids = trial.output<int32_t>(tokens * p.routing.topk);
  return p;
}

uint64_t kind_of(const RouteGradProblem& p) {
  return kind(kind(p.routing), p.logits.dtype, p.logits.cols, p.dlogits.dtype);
}

RouteGradProblem small_like(const RouteGradProblem& like, Trial& trial) {
  constexpr int64_t tokens = 37;
  const int64_t experts = like.logits.cols, slots = like.routing.topk;
  return {.routing = unscaled(like.routing),
          .logits = trial.matrix(like.logits.dtype, tokens, experts),
          .ids = trial.ids(tokens, slots, experts),
          .dweights = static_cast<const float*>(trial.values(DType::f32, tokens * slots)),
          .dlogits = trial.output(like.dlogits.dtype, tokens, experts)};
}

/// Places of ids, of which a token has one.
static constexpr int64_t kPlaces = 600;

uint64_t kind_of(const CapacityProblem& p) { return kind(p.num_experts); }

CapacityProblem small_like(const CapacityProblem& like, Trial& trial) {
  return {.ids = trial.ids(kPlaces, 1, like.num_experts),
          .count = kPlaces,
          .num_experts = like.num_experts,
          .capacity = kPlaces / like.num_experts + 1,
          .kept = trial.output<int32_t>(kPlaces)};
}

uint64_t kind_of(const ExpertRowsProblem& p) { return kind(p.num_experts, bits(p.offsets)); }

ExpertRowsProblem small_like(const ExpertRowsProblem& like, Trial& trial) {
  ExpertRowsProblem p{.ids = trial.ids(kPlaces, 1, std::max<int64_t>(like.num_experts, 1)), .count = kPlaces};
  p.row_map = trial.output<int32_t>(kPlaces);  // like's may be empty, which has no memory
  if (like.offsets) p.offsets = trial.output<int32_t>(like.num_experts);
  p.num_experts = like.num_experts;
  return p;
}

/// Tokens that have two slots each, more columns than a warp takes at a time, and rows that no token has.
static constexpr int64_t kSmallTokens = 21, kSmallSlots = 2, kSmallRows = 45, kSmallCols = 1096;

/// Each row once.
static RowMap small_map(Trial& trial) {
  return {trial.ids(1, kSmallTokens * kSmallSlots, kSmallRows), kSmallTokens, kSmallSlots};
}
static const float* small_weights(const float* like, Trial& trial) {
  return like ? static_cast<const float*>(trial.values(DType::f32, kSmallTokens * kSmallSlots)) : nullptr;
}

uint64_t kind_of(const PermuteProblem& p) { return kind(p.to.dtype, bits(p.weights)); }

PermuteProblem small_like(const PermuteProblem& like, Trial& trial) {
  return {.from = trial.matrix(like.to.dtype, kSmallTokens, kSmallCols),
          .map = small_map(trial),
          .weights = small_weights(like.weights, trial),
          .to = trial.output(like.to.dtype, kSmallRows, kSmallCols)};
}

uint64_t kind_of(const UnpermuteProblem& p) { return kind(p.to.dtype, bits(p.weights)); }

UnpermuteProblem small_like(const UnpermuteProblem& like, Trial& trial) {
  return {.from = trial.matrix(like.to.dtype, kSmallRows, kSmallCols),
          .map = small_map(trial),
          .weights = small_weights(like.weights, trial),
          .to = trial.output(like.to.dtype, kSmallTokens, kSmallCols)};
}

uint64_t kind_of(const PermutedDotProblem& p) { return kind(p.permuted.dtype); }

PermutedDotProblem small_like(const PermutedDotProblem& like, Trial& trial) {
  return {.permuted = trial.matrix(like.permuted.dtype, kSmallRows, kSmallCols),
          .tokens = trial.matrix(like.permuted.dtype, kSmallTokens, kSmallCols),
          .map = small_map(trial),
          .to = trial.output<float>(kSmallTokens * kSmallSlots)};
}

}  // namespace quire::cuda
