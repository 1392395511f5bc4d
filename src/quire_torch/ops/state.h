// Operators that change the state of a module: counters of random streams, amaxes, gradients to be computed later.
#pragma once

#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// counter += 1 of sr_state {seed, counter}: once per backward of a module, after its linear_bwd.
struct SrAdvance : OpBase {
  static constexpr const char* kName = "sr_advance_";
  struct Args {
    op::Mutable<at::Tensor> sr_state;
    static constexpr auto kFields = std::tuple{op::field<&Args::sr_state>("sr_state")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// {seed, counter}; throws unless it is an int64 [2] tensor.
void check_sr_state(const at::Tensor& state);

/// amax[slot n + i] = max(amax[slot n + i], value[i]) for value float32 [n], one for each of the groups that a state
/// has: idempotent, so that a recomputed forward pass changes nothing. NaN is ignored (numerics.md 0.8, 1.5).
struct AmaxMax : OpBase {
  static constexpr const char* kName = "amax_max_";
  struct Args {
    op::Mutable<at::Tensor> amax;
    at::Tensor value;
    int64_t slot;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::amax>("amax"), op::field<&Args::value>("value"), op::field<&Args::slot>("slot")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// Keeps copies of the operands of a weight gradient that will be computed later (six buffers for wgrad_, or dy and x
/// themselves; offsets behind them for groups), under the number in `stash`, int64 [2] {number, how many are kept},
/// which counts up. The stash is on the CPU, whichever device computes: the process has the operands, and nothing that
/// a kernel reads says which. Copies, because a compiled graph reuses its memory. overwrite: the gradient is to replace
/// what is there instead of being added.
struct WgradStash : OpBase {
  static constexpr const char* kName = "wgrad_stash_";
  struct Args {
    op::Mutable<at::Tensor> stash;
    op::TensorList operands;
    c10::SymInt tokens;
    OptionalRecipeText recipe;
    bool overwrite;
    static constexpr auto kFields = std::tuple{op::field<&Args::stash>("stash"), op::field<&Args::operands>("operands"),
                                               op::field<&Args::tokens>("tokens"), op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::overwrite>("overwrite", "False")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// Calls wgrad_stash_. Of operands on the meta device there is nothing to keep.
void keep_operands(const WgradStash::Args& a);

/// The oldest operands kept under the number in `stash`, which counts down, with tokens, recipe and overwrite; an empty
/// list if there are none. Not for graphs.
std::tuple<std::vector<at::Tensor>, int64_t, std::string, bool> take_stashed(const at::Tensor& stash);
/// Drops all operands kept under that number.
void drop_stashed(int64_t number);

}  // namespace quire_torch
