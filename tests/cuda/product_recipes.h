// Products of the recipes' specs, in every direction and with every option, for tests of the rows that compute them.
#pragma once

#include "cuda/product_case.h"

namespace quire::testing {

struct Recipe {
  const char *x, *w, *dy;
};
/// Those of numerics.md 6.4 with their options, and specs that no recipe has.
inline constexpr std::array kRecipes{
    Recipe{"fp8_tensor:nan", "fp8_tensor:nan", "fp8_tensor:e5m2:nan"},
    Recipe{"fp8_tensor:given", "fp8_tensor:pow2", "fp8_tensor"},
    Recipe{"fp8_row", "fp8_row:pow2", "fp8_row:e5m2"},
    Recipe{"fp8_block:pow2:nan", "fp8_block:128x128:pow2:nan", "fp8_block:pow2:nan"},
    Recipe{"fp8_block", "fp8_block", "fp8_block:e5m2:128x128"},
    Recipe{"mxfp4:nan", "mxfp4:nan", "mxfp8:nan"},
    Recipe{"mxfp8", "mxfp4", "mxfp8:e5m2"},
    Recipe{"mxfp8:nan", "mxfp8:nan", "mxfp8:nan"},
    Recipe{"mxfp8", "mxfp8:32x32", "mxfp8:e5m2"},
    Recipe{"nvfp4:rht:nan", "nvfp4:16x16:nan", "nvfp4:rht:sr:nan"},
    Recipe{"nvfp4", "nvfp4", "nvfp4:sr"},
    Recipe{"nvfp4:row_scaled", "nvfp4:4over6=mae:256", "nvfp4:rht=unsigned"},
    Recipe{"nvfp4:global=div", "nvfp4:global=mul", "nvfp4"},
    Recipe{"nvfp4", "mxfp8", "fp8_tensor"},
    Recipe{"mxfp8:swizzled", "mxfp8:swizzled", "mxfp8:e5m2:swizzled"},
    Recipe{"nvfp4:rht:swizzled", "nvfp4:16x16:swizzled", "nvfp4:rht:sr:swizzled"},
    Recipe{"mxfp8:interleaved", "mxfp8:interleaved", "mxfp8:interleaved"},
    Recipe{"nvfp4:rht:interleaved", "nvfp4:16x16:interleaved", "nvfp4:rht:interleaved"},
    Recipe{"mxfp4:interleaved", "fp8_block:interleaved", "fp8_row:interleaved"},
};

/// Operands of the three products of a Linear.
inline std::array<std::array<Operand, 2>, 3> products(ProductCases& cases, const Recipe& r, const Shape3& s,
                                                      uint64_t kind) {
  cases.numbers = kind;
  return {{{cases.operand(r.x, kRows, s.m, s.k), cases.operand(r.w, kRows, s.n, s.k)},
           {cases.operand(r.dy, kRows, s.m, s.n), cases.operand(r.w, kColumns, s.n, s.k)},
           {cases.operand(r.dy, kColumns, s.m, s.n), cases.operand(r.x, kColumns, s.m, s.k)}}};
}

inline bool transformed(const Operand& o) { return o.direction == kColumns && o.spec.hadamard != Hadamard::off; }

/// Calls each(problem, output) with products of every recipe, with every option in turn; `step`: 2 for half of them.
template <class Each>
void each_product(ProductCases& cases, uint64_t step, const Each& each) {
  uint64_t turn = 0;
  for (const Recipe& r : kRecipes)
    for (const Shape3& s : kShapes) {
      if (++turn % step != 0) continue;
      cases.clear();
      const uint64_t kind = cases.die(4);
      for (const auto& [a, b] : products(cases, r, s, kind)) {
        if (transformed(a) != transformed(b)) continue;
        const Output o = cases.output(kDTypes[turn % 3], a.outer, b.outer);
        GemmProblem p{.a = a, .b = b, .out = o.out};
        if (cases.die(2)) {
          const Vector bias = cases.vector(kDTypes[cases.die(3)], b.outer);
          p.bias = bias.data, p.bias_dtype = bias.dtype;
        }
        const Output other = cases.output(o.out.dtype, a.outer, o.out.row_stride);
        if (const uint64_t added = cases.die(4); added < 2) p.addend = added ? o.out.data : other.out.data;
        each(p, o);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
}

/// The three grouped products of a recipe: what a row must give each of them, for every grouping.
template <class Each>
void each_grouped_product(ProductCases& cases, const Recipe& r, const Each& each) {
  for (const Grouping& g : groupings()) {
    SCOPED_TRACE(g.what);
    const int64_t count = std::ssize(g.ends);
    {
      const uint64_t turn = cases.die(4);
      cases.clear();
      const RowGroups groups = cases.groups(g.ends, kTokens, g.wide), weights = RowGroups::equal(count, kOutputs);
      const DType dtype = kDTypes[turn % 3];
      const Vector bias = cases.vector(DType::bf16, count * kOutputs);
      const Output y = cases.output(dtype, kTokens, kOutputs), dx = cases.output(dtype, kTokens, kInputs);
      GemmProblem fprop{.a = cases.operand(r.x, kRows, kTokens, kInputs, groups),
                        .b = cases.operand(r.w, kRows, count * kOutputs, kInputs, weights),
                        .out = y.out,
                        .addend = turn == 1 ? y.out.data : nullptr};
      if (turn % 2) fprop.bias = bias.data, fprop.bias_dtype = bias.dtype;
      each(fprop, y);
      each(GemmProblem{.a = cases.operand(r.dy, kRows, kTokens, kOutputs, groups),
                       .b = cases.operand(r.w, kColumns, count * kOutputs, kInputs, weights),
                       .out = dx.out},
           dx);
      const Operand dy = cases.operand(r.dy, kColumns, kTokens, kOutputs, groups),
                    x = cases.operand(r.x, kColumns, kTokens, kInputs, groups);
      if (transformed(dy) != transformed(x)) continue;
      const Output dw = cases.output(dtype, count * kOutputs, kInputs, turn == 2 ? 0 : count);
      each(GemmProblem{.a = dy, .b = x, .out = dw.out, .addend = turn % 2 ? dw.out.data : nullptr, .outs = dw.each},
           dw);
    }
  }
}

}  // namespace quire::testing
