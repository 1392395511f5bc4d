// How products of codes are divided among kernels, for whoever needs one that goes to the same kernel.
#pragma once

#include "quire/base/context.h"
#include "quire/cuda/driver.h"
#include "quire/spec/problem.h"

namespace quire::cuda {

/// Whether the row "decode", or "tiles", computes a product by its kernel of large tiles.
bool takes_large_tiles(const GemmProblem& p, const Context& context);
bool takes_large_tiles(const MatmulProblem& p, const Context& context);
/// Whether the row "pipelined_bf16", or "pipelined", computes a product by its kernel of wide tiles.
bool takes_wide_tiles(const GemmProblem& p, const Context& context);
bool takes_wide_tiles(const MatmulProblem& p, const Context& context);
/// Rows of each product, at most.
int64_t most_rows(const MatmulProblem& p);
/// Whether that many products of `rows` rows fill the device with large tiles.
bool enough_for_large_tiles(int64_t products, int64_t rows, int64_t cols, const Context& context);
/// The same of wide tiles of the pipeline.
bool enough_for_wide_tiles(int64_t products, int64_t rows, int64_t cols, const Context& context);

/// Tiles of the pipeline, of outputs of all groups.
struct PipelinedTiles {
  bool wide;
  int64_t rows, cols, groups;
};
/// As many blocks as multiprocessors hold, or as there can be tiles.
Grid pipelined_grid(const PipelinedTiles& tiles, const Context& context);

}  // namespace quire::cuda
