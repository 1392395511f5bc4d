// Which rows go to which expert, and how their results come together again.
#pragma once

#include "quire/runner/arena.h"

namespace quire {

/// The choices of tokens: ids [T, top_k], an expert in [0, E) or -1 for none, and their weights.
struct Choices {
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
  int64_t tokens = 0, top_k = 0;

  int64_t count() const { return tokens * top_k; }
};

/// Choices sorted by expert, those of one expert in order of tokens. Memory is an arena's.
struct Assignment {
  int64_t* first;    ///< [E + 1]: expert e has the rows [first[e], first[e + 1])
  int64_t* choice;   ///< by row: the choice, token * top_k + j, that it stands for
  int64_t* row;      ///< by choice: its row, or -1 where its id is
  int64_t rows = 0;  ///< in all

  int64_t rows_of(int64_t expert) const { return first[expert + 1] - first[expert]; }
};

Assignment assign(const Choices& choices, int64_t experts, Arena& arena);

/// rows[i] = x[token of choice[i]], times the choice's weight if `weighted`: in f32, rounded to x's dtype.
void gather(const Matrix& x, const Choices& choices, const int64_t* choice, bool weighted, const MutableMatrix& rows);

/// out[t] = sum over j of weight[t, j] * results[row[t, j]], each product and each sum rounded to f32, j ascending from
/// a sum of 0; then rounded to out's dtype once. Choices without a row add nothing. Not `weighted`: all weights are 1.
void combine(const Matrix& results, const Choices& choices, const int64_t* row, bool weighted,
             const MutableMatrix& out);

}  // namespace quire
