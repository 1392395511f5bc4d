// Mixtures of experts under test.
#pragma once

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "guarded.h"
#include "quire/format/element.h"
#include "quire/runner/moe_runner.h"

namespace quire::testing {

/// The choices of tokens: experts [tokens, top_k], -1 for none, and their weights.
struct Choices {
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
  int64_t tokens = 0, top_k = 0;

  int64_t count() const { return tokens * top_k; }
};

inline Matrix slice(const Matrix& m, int64_t first, int64_t rows) {
  return {static_cast<const char*>(m.data) + first * m.row_stride * size_of(m.dtype), m.dtype, rows, m.cols,
          m.row_stride};
}

inline double at(const Matrix& m, int64_t r, int64_t c) {
  return static_cast<double>(load_element(m.data, m.dtype, r * m.row_stride + c));
}

/// The weights of `count` experts from stacks [E * N, K].
inline Experts experts_of(const Matrix& w13, const Matrix& w2, int64_t count, const QuantSpec& spec) {
  return {PreparedWeight(w13, spec, {.count = count}), PreparedWeight(w2, spec, {.count = count})};
}

/// The mixture's result for x, in x's dtype.
inline Guarded result_of(MoeRunner& runner, const Matrix& x, const Choices& c) {
  Guarded out(x.rows * runner.info().out_features * size_of(x.dtype));
  runner.run({.x = x,
              .out = {out.data(), x.dtype, x.rows, runner.info().out_features, runner.info().out_features},
              .expert_ids = c.ids,
              .expert_weights = c.weights,
              .top_k = c.top_k});
  EXPECT_TRUE(out.intact()) << "wrote outside of out";
  return out;
}

}  // namespace quire::testing
