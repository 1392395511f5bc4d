// Row maps: where rows go when tokens are grouped by expert, and when groups move (moe-reference.md 2).
#pragma once

#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// Throws unless `t` is dense int32; `what` is "op: argument".
template <class... What>
void check_ids(const at::Tensor& t, const What&... what) {
  quire::check(t.scalar_type() == at::kInt && t.layout() == at::kStrided, what..., " must be dense int32, got ",
               t.scalar_type(), " with layout ", t.layout(), "; convert it with .to(torch.int32)");
}

/// Whether two sizes are equal. True for symbolic ones of which tracing cannot know; kernels will.
template <class Int>
bool may_equal(const Int& a, const Int& b) {
  if constexpr (std::same_as<Int, c10::SymInt>) {
    return TORCH_GUARD_OR_TRUE(a.sym_eq(b));
  } else {
    return a == b;
  }
}

/// topk_ids int32 [T, k], numbers of experts or -1 for none -> row_map int32 [T, k]: the row of each place when places
/// are sorted by expert, stably, or -1; offsets int32 [num_experts]: the row where each expert's rows end. num_experts
/// 0: not known; offsets is absent.
struct ExpertRows : OpBase {
  static constexpr const char* kName = "expert_rows";
  static constexpr const char* kNotDifferentiable = "has no gradient; its results are integers";
  struct Args {
    at::Tensor topk_ids;
    int64_t num_experts;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::topk_ids>("topk_ids"), op::field<&Args::num_experts>("num_experts")};
  };
  static constexpr std::array kResults{"row_map", "offsets"};

  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a) {
    check_ids(a.topk_ids, "permute or tokens_per_expert (expert_rows): topk_ids");
    quire::check(a.topk_ids.dim() == 2,
                 "permute or tokens_per_expert (expert_rows): topk_ids must be [tokens, topk], got ",
                 op::sizes<Int>(a.topk_ids), "; use .reshape(-1, topk)");
    quire::check(
        a.num_experts >= 0,
        "permute or tokens_per_expert (expert_rows): num_experts must be at least 1, or 0 if it is not known; got ",
        a.num_experts);
    return {op::Result<Int>{{op::size<Int>(a.topk_ids, 0), op::size<Int>(a.topk_ids, 1)}, at::kInt},
            op::Result<Int>{{Int(a.num_experts)}, at::kInt}};
  }
  static void run(const Args& a, op::Tensors<2>& out, const quire::Context& context);
};

/// sizes [G] int32 or int64 of chunks of rows, order [G] likewise or none -> row_map int32 [rows, 1]: where each row
/// goes when the chunks stand in that order, each beginning at a multiple of align. Rows after the last chunk stay
/// behind it.
struct ChunkRows : OpBase {
  static constexpr const char* kName = "chunk_rows";
  static constexpr const char* kNotDifferentiable = "has no gradient; its result is an integer";
  struct Args {
    at::Tensor sizes;
    op::OptionalTensor order;
    int64_t align;
    c10::SymInt rows;
    static constexpr auto kFields = std::tuple{op::field<&Args::sizes>("sizes"), op::field<&Args::order>("order"),
                                               op::field<&Args::align>("align"), op::field<&Args::rows>("rows")};
  };
  static constexpr std::array kResults{"row_map"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_numbers(a.sizes, "chunk_rows: sizes");
    if (a.order) {
      check_numbers(*a.order, "chunk_rows: order");
      check_one_device(a.order->device(), a.sizes.device(), "chunk_rows: order and sizes");
    }
    return {op::Result<Int>{{op::as<Int>(a.rows), Int(1)}, at::kInt}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);

  static void check_numbers(const at::Tensor& t, const char* what) {
    quire::check((t.scalar_type() == at::kInt || t.scalar_type() == at::kLong) && t.dim() == 1, what,
                 " must be a vector of int32 or int64, got ", t.scalar_type(), " of ", t.dim(), " dimensions");
  }
};

}  // namespace quire_torch
