// Random numbers of kinds that find different errors.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace quire::testing {

/// A number of one of eight kinds, where die(n) gives a number below n. Kind 0: normal, 1 with what is not finite, 2 of
/// many magnitudes, 3 any bits, 4 subnormal, 5 zero, 6 of few bits, so that ties are common, 7 at the ends of float16.
template <class Dice>
float draw(Dice& dice, uint64_t kind) {
  const float sign = dice.die(2) ? 1.0f : -1.0f, normal = sign * static_cast<float>(dice.die(1 << 20)) / (1 << 18);
  const auto bits = [&](uint64_t n) { return std::bit_cast<float>(static_cast<uint32_t>(dice.die(n))); };
  constexpr std::array special{NAN, INFINITY, -INFINITY, -0.0f, 0.0f};
  switch (kind) {
    case 1:
      return dice.die(8) == 0 ? special[dice.die(special.size())] : normal;
    case 2:
      return std::ldexp(normal, static_cast<int>(dice.die(60)) - 30);
    case 3:
      return bits(uint64_t{1} << 32);
    case 4:
      return sign * bits(1 << 24);
    case 5:
      return 0;
    case 6:
      return static_cast<float>(static_cast<int>(dice.die(129)) - 64) / 16;
    case 7:
      return sign * (dice.die(8) ? 65504.0f / static_cast<float>(1 << dice.die(17)) : std::ldexp(normal, -24));
    default:
      return normal;
  }
}

}  // namespace quire::testing
