// Collectives of parallel_linear in pieces, so that one piece travels while another one is multiplied: overlap=ring.
// Rows of a product do not depend on one another, so pieces of it have the bits of the whole.
#pragma once

#include <vector>

#include "quire_torch/ops/parallel.h"

namespace quire_torch {

/// Rows of all ranks, which come one rank after another.
class Arrivals {
 public:
  /// Starts to send this rank's rows [T, *, K] to all.
  Arrivals(const at::Tensor& own, const Group& group);
  /// The same of rowwise codes. given_scale: as of gather(); each rank's rows come with its scale.
  Arrivals(const DirectionBuffers& own, const quire::QuantSpec& spec, const Group& group, bool given_scale);

  int64_t count() const { return group_.size; }
  /// What rank i sent, when it is there: its codes, or its values in the first place.
  DirectionBuffers take(int64_t i) const;

 private:
  bool travels(size_t k) const { return axes_[k].axis >= 0 || (own_scales_ && k == 1); }

  DirectionBuffers own_;
  bool coded_, own_scales_ = false;
  std::array<TokenAxis, 3> axes_{};
  Group group_;
  std::vector<at::Tensor> started_;
};

/// Piece `i` of as many as there are ranks: some rows of what each of them gets of a sum, from `begin` on.
struct Cut {
  c10::SymInt begin, length;
};
/// rows: what each rank gets. Pieces end on multiples of `block`, which divides rows.
Cut cut(int64_t i, const c10::SymInt& rows, int64_t block, const Group& group);
/// The rows of a piece: [size * length, N] of t [T, *, N].
at::Tensor rows_of(const at::Tensor& t, const Cut& piece, const Group& group);
/// The same of rowwise codes of a matrix of `rows` rows.
DirectionBuffers rows_of(const DirectionBuffers& codes, const quire::QuantSpec& spec, const Cut& piece,
                         const Group& group);

/// Sums over the group that are under way: of all rows of a result, or of pieces, one after another.
struct Sums {
  std::vector<at::Tensor> started{};
  std::vector<c10::SymInt> rows{};  ///< of each piece, in the result; empty where one sum is of all rows

  void start(const at::Tensor& partial, const Parallel& p, const Cut& piece);
  /// As wait_for_sum().
  at::Tensor wait(const Parallel& p, const std::vector<c10::SymInt>& sizes, at::ScalarType dtype,
                  const op::OptionalTensor& bias = std::nullopt) const;
};

}  // namespace quire_torch
