// Norms, activations, their gradients and column sums with random operands and destinations: each is computed by the
// CPU and by the CUDA device, and the results are compared.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <sstream>

#include "cuda/drawn.h"
#include "cuda/grammar.h"
#include "cuda/twins.h"
#include "quire/spec/block_codes.h"

namespace quire::testing {

inline constexpr std::array kFloats{DType::f32, DType::f16, DType::bf16};

/// Makes problems of random sizes, and counts what is compared.
class PointwiseComparison {
 public:
  explicit PointwiseComparison(uint64_t seed) : dice_(seed) {
    for (const std::string& text : whole_grammar()) {
      const QuantSpec spec = QuantSpec::parse(text);
      if (!spec.stochastic && !spec.interleaved) specs_.push_back(spec);
    }
  }

  uint64_t die(uint64_t n) { return dice_() % n; }
  bool coin() { return die(2) == 0; }
  DType any_dtype() { return kFloats[die(3)]; }
  /// Of a large matrix.
  DType dtype() { return aligned_ ? *aligned_ : any_dtype(); }
  /// A number of columns near this one.
  int64_t columns(int64_t cols) const { return aligned_ ? round_up(cols, int64_t{8}) : cols; }

  /// Begins a case: frees the memory of the one before. aligned: large matrices are of one dtype, and each row begins
  /// at a multiple of 16 bytes.
  void begin(uint64_t kind, bool aligned) {
    twins.device.clear();
    written.clear();
    kind_ = kind;
    aligned_ = aligned ? std::optional(any_dtype()) : std::nullopt;
  }
  /// Numbers of the kind. A matrix has a larger stride half of the time, and a stride of 0 now and then.
  Matrix matrix(DType dtype, int64_t rows, int64_t cols) {
    const int64_t stride = die(9) == 0 ? 0 : wider(cols);
    return numbers({nullptr, dtype, rows, cols, stride});
  }
  Vector vector(DType dtype, int64_t count) { return {numbers({nullptr, dtype, 1, count, count}).data, dtype}; }
  float* floats(int64_t count) {
    return static_cast<float*>(const_cast<void*>(numbers({nullptr, DType::f32, 1, count, count}).data));
  }

  /// Memory for results of a dtype, which are compared.
  void* result(const char* what, DType dtype, int64_t count) {
    written.push_back({what, twins.room<std::byte>(count * size_of(dtype)), count * size_of(dtype), dtype});
    return written.back().data;
  }
  MutableMatrix result_matrix(const char* what, DType dtype, int64_t rows, int64_t cols) {
    const int64_t stride = wider(cols);
    return {result(what, dtype, rows == 0 ? 0 : (rows - 1) * stride + cols), dtype, rows, cols, stride};
  }
  /// Somewhere for y, its codes in one or both directions, or all of it.
  Destination destination(int64_t rows, int64_t cols, const RowGroups& groups = {}, Room* room = nullptr);
  /// Groups of the rows: none, equal ones, or ends, which may leave rows over and groups empty.
  RowGroups groups(int64_t rows);

  template <class Problem>
  void compare(const Problem& problem) {
    std::istringstream rows(explain_choice(problem, twins.device));
    for (std::string row; std::getline(rows, row);)
      if (row.ends_with(": runs")) ++ran[row.substr(0, row.find(':'))];
    try {
      twins.expect_same(problem, written);
    } catch (const std::exception& e) {
      ADD_FAILURE() << to_string(problem) << ": " << e.what();
    }
    compared += written.size();
  }

  Twins twins;
  std::vector<Written> written;
  uint64_t compared = 0, turn = 0;
  std::map<std::string, uint64_t> ran;  ///< how often each row of the device

 private:
  int64_t wider(int64_t cols) {
    const auto more = static_cast<int64_t>(coin() ? die(9) : 0);
    return cols + (aligned_ ? 8 * more : more);
  }
  Matrix numbers(const Matrix& m) {
    const int64_t count = m.rows == 0 ? 0 : (m.rows - 1) * m.row_stride + m.cols;
    auto* const to = twins.room<std::byte>(count * size_of(m.dtype));
    for (int64_t i = 0; i < count; ++i) store_element(to, m.dtype, i, draw(*this, kind_));
    return {to, m.dtype, m.rows, m.cols, m.row_stride};
  }
  void* bytes(const char* what, int64_t count) {
    written.push_back({what, twins.room<std::byte>(count), count});
    return written.back().data;
  }
  Side side(const QuantSpec& spec, const BufferCounts<int64_t>& count) {
    Side s;
    s.data = bytes("data", count[0]), s.scale = bytes("scale", count[1] * (has_byte_scales(spec) ? 1 : 4));
    if (count[2] > 0) s.amax = static_cast<float*>(bytes("amax", count[2] * 4));
    return s;
  }

  std::mt19937_64 dice_;
  std::vector<QuantSpec> specs_;
  uint64_t kind_ = 0;
  std::optional<DType> aligned_;
};

inline Destination PointwiseComparison::destination(int64_t rows, int64_t cols, const RowGroups& groups, Room* room) {
  Destination to{.y = {nullptr, dtype(), rows, cols, cols}};
  const uint64_t wanted = die(6);  // half of the time codes alone
  if (wanted < 3) to.y = result_matrix("y", to.y.dtype, rows, cols);
  if (wanted == 0) return to;
  to.spec = specs_[die(specs_.size())];
  const GroupSizes<int64_t> sizes{rows, cols, groups.count};
  const auto positive = [&](int64_t count, uint64_t zeros) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = zeros && die(9) < zeros ? 0.0f : std::ldexp(1.0f + static_cast<float>(die(64)) / 64, 3);
    return twins.array(values);
  };
  if (to.spec.given || (to.spec.row().scope == Scope::tensor && die(4) == 0)) to.scale = positive(groups.count, 0);
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    if (wanted % 3 == (d == Direction::rowwise ? 1 : 2)) continue;
    const BufferCounts<int64_t> count =
        room ? grouped_counts(to.spec, sizes, d) : counts(buffers<int64_t>(to.spec, {rows, cols}, d));
    (d == Direction::rowwise ? to.rowwise : to.columnwise) = side(to.spec, count);
    if (room) (d == Direction::rowwise ? room->rowwise : room->columnwise) = count;
    const int64_t amaxes = grouped_amax_count(to.spec, sizes, d);
    if (amaxes > 0 && !to.scale && die(4) == 0)
      (d == Direction::rowwise ? to.amax.rowwise : to.amax.columnwise) = positive(amaxes, 1);
  }
  return to;
}

inline RowGroups PointwiseComparison::groups(int64_t rows) {
  const uint64_t kind = die(4);
  if (kind == 0) return {};
  const auto count = static_cast<int64_t>(1 + die(6));
  if (kind == 1 && rows % count == 0) return RowGroups::equal(count, rows / count);
  std::vector<int64_t> ends(static_cast<size_t>(count));
  for (int64_t& end : ends) end = static_cast<int64_t>(die(static_cast<uint64_t>(rows) + 1));
  if (coin()) ends.back() = rows;
  std::sort(ends.begin(), ends.end());
  RowGroups g{.count = count, .rows = rows, .ends = {nullptr, count, coin()}};
  if (g.ends.wide)
    g.ends.data = twins.array(ends);
  else
    g.ends.data = twins.array(std::vector<int32_t>(ends.begin(), ends.end()));
  return g;
}

}  // namespace quire::testing
