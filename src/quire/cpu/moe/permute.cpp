#include "quire/cpu/moe/moe.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "quire/base/fault.h"
#include "quire/base/parallel.h"
#include "quire/base/shape.h"
#include "quire/cpu/workspace.h"
#include "quire/format/element.h"
#include "quire/spec/row_map.h"
#include "quire/spec/sums.h"

namespace quire::cpu {
namespace {

/// Elements that are worth a thread.
constexpr int64_t kGrain = 1 << 14;

/// Columns that are weighted or summed at a time, in float32.
constexpr int64_t kPiece = 256;

int64_t grain(int64_t elements) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements)); }

const char* row_of(const Matrix& x, int64_t r) {
  return static_cast<const char*>(x.data) + r * x.row_stride * size_of(x.dtype);
}
char* row_of(const MutableMatrix& x, int64_t r) {
  return static_cast<char*>(x.data) + r * x.row_stride * size_of(x.dtype);
}
template <class M>
int64_t bytes_of_row(const M& x) {
  return x.cols * size_of(x.dtype);
}

/// A row, from a column on.
struct Place {
  int64_t row, col = 0;
};

template <DType T>
void load_as(const void* row, std::span<float> to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = load_element(row, T, static_cast<int64_t>(i));
}

void load(const Matrix& x, const Place& at, std::span<float> to) {
  const char* row = row_of(x, at.row) + at.col * size_of(x.dtype);
  x.dtype == DType::f32   ? load_as<DType::f32>(row, to)
  : x.dtype == DType::f16 ? load_as<DType::f16>(row, to)
                          : load_as<DType::bf16>(row, to);
}

template <DType T>
void store_as(std::span<const float> from, void* row) {
  for (size_t i = 0; i < from.size(); ++i) store_element(row, T, static_cast<int64_t>(i), from[i]);
}

void store(std::span<const float> from, const MutableMatrix& x, const Place& at) {
  char* row = row_of(x, at.row) + at.col * size_of(x.dtype);
  x.dtype == DType::f32   ? store_as<DType::f32>(from, row)
  : x.dtype == DType::f16 ? store_as<DType::f16>(from, row)
                          : store_as<DType::bf16>(from, row);
}

void check_row(const char* op, const RowMap& map, int64_t place, int64_t rows) {
  if (!is_number_or_none(map.rows[place], rows)) [[unlikely]]
    raise(op, ValueRule::row_map,
          {.index = place / map.slots, .value = map.rows[place], .limit = rows, .more = {place % map.slots}});
}

/// The place of the map that goes to each row, or -1.
void find_sources(const RowMap& map, std::span<int64_t> source) {
  const int64_t rows = std::ssize(source);
  std::fill(source.begin(), source.end(), -1);
  for (int64_t place = 0; place < map.tokens * map.slots; ++place) {
    check_row("permute", map, place, rows);
    if (map.rows[place] < 0) continue;
    int64_t& of_row = source[static_cast<size_t>(map.rows[place])];
    if (of_row >= 0) [[unlikely]]
      raise("permute", ValueRule::row_once, {.index = place, .value = map.rows[place], .more = {of_row}});
    of_row = place;
  }
}

/// Sums of tokens' rows.
class Combiner {
 public:
  explicit Combiner(const UnpermuteProblem& p) : p_(p) {}

  void combine(int64_t token) const {
    const int64_t first = token * p_.map.slots, end = first + p_.map.slots;
    for (int64_t place = first; place < end; ++place) check_row("unpermute", p_.map, place, p_.from.rows);
    const int64_t place = next(first, end);
    const auto bytes = static_cast<size_t>(bytes_of_row(p_.to));
    if (place == end)
      std::memset(row_of(p_.to, token), 0, bytes);
    else if (!p_.weights && next(place + 1, end) == end)
      std::memcpy(row_of(p_.to, token), row_of(p_.from, p_.map.rows[place]), bytes);
    else
      for (int64_t col = 0; col < p_.to.cols; col += kPiece) add_up(place, end, {token, col});
  }

 private:
  /// The next place of the token that has a row.
  int64_t next(int64_t place, int64_t end) const {
    while (place < end && p_.map.rows[place] < 0) ++place;
    return place;
  }

  /// A piece of a sum, of the rows of the places from the first that has one.
  void add_up(int64_t first, int64_t end, const Place& to) const {
    float sums[kPiece], rows[kPiece];
    const auto count = static_cast<size_t>(std::min(kPiece, p_.to.cols - to.col));
    std::span sum(sums, count), row(rows, count);
    add_rows(
        {first, end}, sum, row, [&](int64_t place) { return next(place, end); },
        [&](int64_t place, std::span<float> piece) { load_weighted(place, to.col, piece); });
    store(sum, p_.to, to);
  }

  void load_weighted(int64_t place, int64_t col, std::span<float> to) const {
    load(p_.from, {p_.map.rows[place], col}, to);
    if (p_.weights)
      for (float& x : to) x *= p_.weights[place];
  }

  const UnpermuteProblem& p_;
};

/// A row times its weight.
void move_weighted(const PermuteProblem& p, int64_t place, int64_t row) {
  float line[kPiece];
  for (int64_t col = 0; col < p.to.cols; col += kPiece) {
    const std::span piece(line, static_cast<size_t>(std::min(kPiece, p.to.cols - col)));
    load(p.from, {place / p.map.slots, col}, piece);
    for (float& x : piece) x *= p.weights[place];
    store(piece, p.to, {row, col});
  }
}

}  // namespace

void permute(const PermuteProblem& p, const Context& context) {
  const WorkspaceSpan<int64_t> workspace(context, p.to.rows);
  const std::span<int64_t> source = workspace;
  find_sources(p.map, source);
  const auto bytes = static_cast<size_t>(bytes_of_row(p.to));
  if (bytes == 0) return;
  parallel_for(p.to.rows, grain(p.to.cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t place = source[static_cast<size_t>(row)];
      if (place < 0) {
        std::memset(row_of(p.to, row), 0, bytes);
      } else if (!p.weights) {
        std::memcpy(row_of(p.to, row), row_of(p.from, place / p.map.slots), bytes);
      } else {
        move_weighted(p, place, row);
      }
    }
  });
}

void unpermute(const UnpermuteProblem& p, const Context&) {
  if (p.to.cols == 0) return;
  parallel_for(p.to.rows, grain(times(p.to.cols, p.map.slots)), [&](int64_t begin, int64_t end) {
    const Combiner combiner(p);
    for (int64_t token = begin; token < end; ++token) combiner.combine(token);
  });
}

void permuted_dot(const PermutedDotProblem& p, const Context&) {
  parallel_for(p.map.tokens, grain(times(p.tokens.cols, p.map.slots)), [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(p.tokens.cols)), y(x);
    for (int64_t token = begin; token < end; ++token) {
      load(p.tokens, {token}, x);
      for (int64_t place = token * p.map.slots; place < (token + 1) * p.map.slots; ++place) {
        check_row("unpermute_dot", p.map, place, p.permuted.rows);
        p.to[place] = 0;
        if (p.map.rows[place] < 0) continue;
        load(p.permuted, {p.map.rows[place]}, y);
        p.to[place] =
            SumOfRow{}(p.tokens.cols, [&](int64_t i) { return x[static_cast<size_t>(i)] * y[static_cast<size_t>(i)]; });
      }
    }
  });
}

}  // namespace quire::cpu
