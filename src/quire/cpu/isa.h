// Which instruction sets exist, which of them this machine can run, and which one is used.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quire/base/lazy.h"
#include "quire/cpu/kernels.h"

namespace quire::cpu {

struct Feature {
  std::string_view name;
  bool (*present)();  ///< on this machine
};

/// A row per instruction set, best first; the last one runs everywhere.
struct Isa {
  std::string_view name;
  std::span<const Feature> needs;
  const Kernels* kernels;
  const GemmKernel* int8 = nullptr;          ///< exact sums of 4-bit codes in int8 lanes, if it has them
  const GemmKernel* bf16 = nullptr;          ///< products in bfloat16 lanes, if it has them
  const GemmKernel* amx = nullptr;           ///< the same by tiles, for blocks of at least 32
  const GemmKernel* amx_nvfp4 = nullptr;     ///< the same by tiles, of NVFP4
  const MatmulKernel* amx_matmul = nullptr;  ///< the same by tiles, of plain matrices

  /// Names of the features that this machine lacks, separated by commas.
  std::string missing() const;
  bool supported() const { return missing().empty(); }
};

std::span<const Isa> all();

/// Names of those this machine can run, best first.
std::vector<std::string_view> supported();

/// The best supported one, or that named by QUIRE_ISA. Throws Error if QUIRE_ISA names one that does not exist or that
/// this machine cannot run.
const Isa& choose();

/// The one in use: choose(), decided once.
inline const Isa& active() {
  static constinit Lazy<const Isa* const> chosen;
  return *chosen.get([] { return &choose(); });
}

}  // namespace quire::cpu
