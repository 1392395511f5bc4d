#include "cuda/emulator/operations.h"

namespace quire::emulator {

Operation operation(const std::string& name) {
  static const Table table = [] {
    Table all;
    for (const auto add :
         {add_integers, add_bit_operations, add_floats, add_halves, add_conversions, add_small_conversions, add_memory,
          add_atomics, add_control, add_warp_words, add_tensor_words})
      add(all);
    return all;
  }();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace quire::emulator
