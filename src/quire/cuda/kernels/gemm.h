// What the host asks the kernels of gemm.cu for.
#pragma once

#include "quire/cuda/kernels/groups.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// One operand of products of groups. Lists are memory of the device here.
struct GroupedOperand {
  Operand all;
  const Side* each = nullptr;
  Places groups;
};

/// Outputs of products of groups, and what is added to them.
struct GroupedOutput {
  MutableMatrix all;
  const MutableMatrix* each = nullptr;
  Vector bias{};
  const Vector* biases = nullptr;
  const void* addend = nullptr;  ///< of groups: not null says that there is one, which is the output
  bool by_rows = true;           ///< groups are rows of `all`; else the products are one after another
  bool in_groups = false;
};

struct GemmJob {
  GroupedOperand a, b;
  GroupedOutput out;
  FaultSite contraction;  ///< of groups that end elsewhere in b than in a
};

struct MatmulJob {
  Matrix a;
  Matrix b;
  const Matrix* bs = nullptr;
  GroupedOperand codes{};  ///< instead of b, with has_codes
  bool has_codes = false;
  bool transpose_a = false, transpose_b = false;
  Places groups;  ///< of the rows of a
  GroupedOutput out;
};

/// Outputs that a block of decode32 computes: so many rows and columns, by as many terms at a time, 16 of them by each
/// thread.
inline constexpr int64_t kProductTile = 64, kProductDepth = 32;
inline constexpr unsigned kProductThreads = kProductTile * kProductTile / 16;

/// Blocks of decode and exact compute tiles of so many rows and columns, by two threads for each row.
inline constexpr int64_t kTensorTile = 64, kLargeTensorTile = 128;

/// Blocks of the pipeline compute tiles of so many rows, and of 128 or of 256 columns by as many threads. Steps of the
/// contraction have so many numbers, and shared memory holds so many steps.
inline constexpr int kPipelinedRows = 128, kPipelinedDepth = 32, kPipelinedStages = 4;
/// Numbers that a copy of 16 bytes has.
inline constexpr int kUnitOfCopies = 8;
constexpr unsigned pipelined_bytes(int cols) {
  return static_cast<unsigned>(kPipelinedStages * (kPipelinedRows + cols) * kPipelinedDepth * 2);
}

/// Columns that a block of few_rows computes, a lane each, and the warps that share the contraction.
inline constexpr int64_t kFewRowsColumns = 32, kFewRowsWarps = 8;
inline constexpr unsigned kFewRowsThreads = kFewRowsColumns * kFewRowsWarps;
/// Rows that few_rows takes. Above, decoding each row's codes for every 32 columns takes more time than the products.
inline constexpr int64_t kMostFewRows = 16;
/// Columns that a block of few_rows computes of a plain product, with a thread for each output that there can be.
inline constexpr int64_t kPlainFewColumns = 16;
inline constexpr unsigned kPlainFewThreads = kPlainFewColumns * kMostFewRows;

}  // namespace quire::cuda
