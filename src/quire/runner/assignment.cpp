#include "quire/runner/assignment.h"

#include <algorithm>
#include <cstring>

#include "quire/base/parallel.h"
#include "quire/format/element.h"

namespace quire {
namespace {

/// Elements that are worth handing to a thread.
constexpr int64_t kGrain = int64_t{1} << 14;
/// Elements of a row that are summed at once, in registers and the nearest cache.
constexpr int64_t kPiece = 256;

int64_t grain(int64_t cols) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols)); }

const char* row_at(const Matrix& m, int64_t row) {
  return static_cast<const char*>(m.data) + row * m.row_stride * size_of(m.dtype);
}
char* row_at(const MutableMatrix& m, int64_t row) {
  return static_cast<char*>(m.data) + row * m.row_stride * size_of(m.dtype);
}

/// f with the dtype as a constant, so that loops over elements have no choice inside.
template <class F>
void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16:
      return f([](const void* p, int64_t i) { return load_element(p, DType::f16, i); },
               [](void* p, int64_t i, float v) { store_element(p, DType::f16, i, v); });
    case DType::bf16:
      return f([](const void* p, int64_t i) { return load_element(p, DType::bf16, i); },
               [](void* p, int64_t i, float v) { store_element(p, DType::bf16, i, v); });
    default:
      return f([](const void* p, int64_t i) { return load_element(p, DType::f32, i); },
               [](void* p, int64_t i, float v) { store_element(p, DType::f32, i, v); });
  }
}

}  // namespace

Assignment assign(const Choices& choices, int64_t experts, Arena& arena) {
  Assignment a{.first = arena.take<int64_t>(experts + 1),
               .choice = arena.take<int64_t>(choices.count()),
               .row = arena.take<int64_t>(choices.count())};
  std::fill_n(a.first, experts + 1, 0);
  for (int64_t i = 0; i < choices.count(); ++i)
    if (choices.ids[i] >= 0) ++a.first[choices.ids[i]];
  // From counts to where each expert ends; filling backwards then moves every entry to where it begins.
  for (int64_t e = 0; e < experts; ++e) a.first[e] = a.rows += a.first[e];
  a.first[experts] = a.rows;
  for (int64_t i = choices.count(); i-- > 0;) {
    a.row[i] = choices.ids[i] < 0 ? -1 : --a.first[choices.ids[i]];
    if (a.row[i] >= 0) a.choice[a.row[i]] = i;
  }
  return a;
}

void gather(const Matrix& x, const Choices& choices, const int64_t* choice, bool weighted, const MutableMatrix& rows) {
  parallel_for(rows.rows, grain(x.cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* from = row_at(x, choice[i] / choices.top_k);
      std::memcpy(row_at(rows, i), from, static_cast<size_t>(x.cols * size_of(x.dtype)));
      if (!weighted) continue;
      const float weight = choices.weights[choice[i]];
      with_dtype(x.dtype, [&](auto load, auto store) {
        for (int64_t c = 0; c < x.cols; ++c) store(row_at(rows, i), c, load(from, c) * weight);
      });
    }
  });
}

void combine(const Matrix& results, const Choices& choices, const int64_t* row, bool weighted,
             const MutableMatrix& out) {
  parallel_for(out.rows, grain(out.cols * choices.top_k), [&](int64_t begin, int64_t end) {
    with_dtype(out.dtype, [&](auto load, auto store) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t first = 0; first < out.cols; first += kPiece) {
          const int64_t count = std::min(kPiece, out.cols - first);
          float sum[kPiece] = {};
          for (int64_t i = t * choices.top_k; i < (t + 1) * choices.top_k; ++i) {
            if (row[i] < 0) continue;
            const float weight = weighted ? choices.weights[i] : 1.0f;
            const char* from = row_at(results, row[i]);
            for (int64_t c = 0; c < count; ++c) sum[c] += weight * load(from, first + c);
          }
          for (int64_t c = 0; c < count; ++c) store(row_at(out, t), first + c, sum[c]);
        }
    });
  });
}

}  // namespace quire
