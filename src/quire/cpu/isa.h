// Which instruction sets exist, which of them this machine can run, and which one is used.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "quire/cpu/kernels.h"

namespace quire::cpu {

/// A row per instruction set, best first; the last one runs everywhere.
struct Isa {
  std::string_view name;
  std::string_view needs;  ///< CPU features, for people
  bool (*supported)();
  const Kernels* kernels;
};

std::span<const Isa> all();

/// Names of those this machine can run, best first.
std::vector<std::string_view> supported();

/// The one in use: the best supported one, or that named by QUIRE_ISA. Decided once; throws Error if QUIRE_ISA names
/// one that does not exist or that this machine cannot run.
const Isa& active();

}  // namespace quire::cpu
