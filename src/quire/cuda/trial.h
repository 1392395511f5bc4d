// Small problems with known data, for the self-check of rows: one for each kind of problem that has several rows.
#pragma once

#include <vector>

#include "quire/base/context.h"
#include "quire/device/device.h"
#include "quire/spec/moe_problem.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// What a trial computes of a product: its result, or the sum of the magnitudes of its terms, which bounds of errors
/// are relative to.
enum class Wanted : uint8_t { result, magnitude };

/// The memory of a small problem. Two trials hold the same data, and zeros where results go.
class Trial {
 public:
  struct Terms {
    const Context& context;
    Wanted wanted = Wanted::result;
    bool large = false;  ///< for rows that take no small problem
  };
  explicit Trial(const Terms& of) : terms(of) {}

  /// What a row writes.
  struct Output {
    void* data;
    DType dtype;  ///< u8: bytes
    int64_t count;
  };

  void* values(DType dtype, int64_t count, bool positive = false);
  Matrix matrix(DType dtype, int64_t rows, int64_t cols);
  Vector vector(const Vector& like, int64_t count);
  int32_t* ids(int64_t tokens, int64_t slots, int64_t experts);
  /// Two groups that have all rows, with ends in memory where `like` has them; or none.
  RowGroups groups(const RowGroups& like, int64_t rows);

  void* output(DType dtype, int64_t count);
  template <class T>
  T* output(int64_t count) {
    return static_cast<T*>(output(DType::u8, count * static_cast<int64_t>(sizeof(T))));
  }
  MutableMatrix output(DType dtype, int64_t rows, int64_t cols);
  /// One direction of a quantized matrix, as output or as memory.
  Side side(const BufferCounts<int64_t>& counts, const QuantSpec& spec, bool is_output);
  /// An operand like that one, of [outer, contraction], by the reference quantizer. `weights`: one of each group.
  Operand operand(const Operand& like, int64_t outer, int64_t contraction, const RowGroups& groups);

  /// Of all outputs, those that are not the other trial's: within `tolerance` of magnitudes' first output, or bytes.
  uint32_t differing(const Trial& expected, const Trial* magnitudes, float tolerance) const;

  const Terms terms;

 private:
  void* lent(int64_t bytes) const;
  std::vector<Output> outputs_;
  uint64_t seed_ = 0;
};

/// A problem of the same kind. It follows from what kind_of() tells apart, and from nothing else of `like`: a row that
/// solves it runs the kernels that it would run for `like`.
QuantizeProblem small_like(const QuantizeProblem& like, Trial& trial);
AmaxProblem small_like(const AmaxProblem& like, Trial& trial);
DequantizeProblem small_like(const DequantizeProblem& like, Trial& trial);
GemmProblem small_like(const GemmProblem& like, Trial& trial);
MatmulProblem small_like(const MatmulProblem& like, Trial& trial);
NormProblem small_like(const NormProblem& like, Trial& trial);
NormGradProblem small_like(const NormGradProblem& like, Trial& trial);
ColumnSumProblem small_like(const ColumnSumProblem& like, Trial& trial);
ActivationProblem small_like(const ActivationProblem& like, Trial& trial);
ActivationGradProblem small_like(const ActivationGradProblem& like, Trial& trial);
RouteProblem small_like(const RouteProblem& like, Trial& trial);
RouteGradProblem small_like(const RouteGradProblem& like, Trial& trial);
CapacityProblem small_like(const CapacityProblem& like, Trial& trial);
ExpertRowsProblem small_like(const ExpertRowsProblem& like, Trial& trial);
PermuteProblem small_like(const PermuteProblem& like, Trial& trial);
UnpermuteProblem small_like(const UnpermuteProblem& like, Trial& trial);
PermutedDotProblem small_like(const PermutedDotProblem& like, Trial& trial);

uint64_t kind_of(const QuantizeProblem& p);
uint64_t kind_of(const AmaxProblem& p);
uint64_t kind_of(const DequantizeProblem& p);
uint64_t kind_of(const GemmProblem& p, const Context& context);
uint64_t kind_of(const MatmulProblem& p, const Context& context);
uint64_t kind_of(const NormProblem& p);
uint64_t kind_of(const NormGradProblem& p);
uint64_t kind_of(const ColumnSumProblem& p);
uint64_t kind_of(const ActivationProblem& p);
uint64_t kind_of(const ActivationGradProblem& p);
uint64_t kind_of(const RouteProblem& p);
uint64_t kind_of(const RouteGradProblem& p);
uint64_t kind_of(const CapacityProblem& p);
uint64_t kind_of(const ExpertRowsProblem& p);
uint64_t kind_of(const PermuteProblem& p);
uint64_t kind_of(const UnpermuteProblem& p);
uint64_t kind_of(const PermutedDotProblem& p);

/// Of what a device has no part in.
template <class Problem>
uint64_t kind_of(const Problem& p, const Context&) {
  return kind_of(p);
}

/// Whether results of the problem's rows differ by roundings: products, whose order of sums is a row's own.
template <class Problem>
inline constexpr bool kIsProduct = false;
template <>
inline constexpr bool kIsProduct<GemmProblem> = true;
template <>
inline constexpr bool kIsProduct<MatmulProblem> = true;

}  // namespace quire::cuda
