// Element and scale formats. A format is one row: what its bits mean. Everything else is derived from the row.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "quire/base/table.h"

namespace quire {

enum class Format : uint8_t { e4m3, e5m2, e2m1, e8m0, e3m2, e2m3 };

/// Which codes are not finite numbers.
enum class Specials : uint8_t {
  none,      ///< every code is a number (E2M1, E3M2, E2M3)
  nan_only,  ///< the all-ones code is NaN, no infinity (E4M3 "fn", E8M0)
  ieee,      ///< the top exponent holds infinity and NaN (E5M2)
};

/// A row. `value = (-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^man_bits)`; exponent 0 is subnormal where there
/// is a mantissa. (OCP Microscaling Formats v1.0 5.3; numerics.md 1.1-1.3)
struct FormatRow {
  std::string_view name;
  int exp_bits;
  int man_bits;
  int bias;
  Specials specials;
  bool is_signed;

  constexpr int bits() const { return exp_bits + man_bits + (is_signed ? 1 : 0); }
  constexpr int codes() const { return 1 << bits(); }
  /// Codes without the sign bit.
  constexpr int magnitudes() const { return 1 << (exp_bits + man_bits); }
  /// The code of the largest finite magnitude.
  constexpr int max_code() const {
    const int top = magnitudes() - 1;
    return specials == Specials::none ? top : specials == Specials::nan_only ? top - 1 : top - (1 << man_bits);
  }
  /// What a NaN input becomes (numerics.md 1.1, 1.2): the largest magnitude code, sign dropped.
  constexpr int nan_code() const { return magnitudes() - 1; }
  /// Whether a code is stored in half a byte; else it has one of its own.
  constexpr bool packed() const { return bits() == 4; }
  constexpr int stored_bits() const { return packed() ? 4 : 8; }
};

/// In the order of Format.
inline constexpr auto kFormats = std::to_array<FormatRow>({
    {"e4m3", 4, 3, 7, Specials::nan_only, true},
    {"e5m2", 5, 2, 15, Specials::ieee, true},
    {"e2m1", 2, 1, 1, Specials::none, true},
    {"e8m0", 8, 0, 127, Specials::nan_only, false},
    {"e3m2", 3, 2, 3, Specials::none, true},
    {"e2m3", 2, 3, 1, Specials::none, true},
});

/// The FormatRow of a format.
constexpr decltype(auto) row(Format f) { return entry<kFormats>(static_cast<size_t>(f)); }

/// The format of packed codes, of which kernels have all 16 values in tables (spec/kinds.h sees to it that specs reach
/// no other).
inline constexpr Format kPackedFormat = Format::e2m1;
static_assert(row(kPackedFormat).packed());

}  // namespace quire
