// How a tensor is quantized, as a value with canonical text. docs/specs.md is the grammar.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>

#include "quire/base/table.h"
#include "quire/format/format.h"

namespace quire {

enum class Family : uint8_t { fp8_tensor, fp8_row, fp8_block, mxfp8, mxfp4, nvfp4 };

/// How a scale is stored and derived.
enum class ScaleKind : uint8_t {
  f32,        ///< float32, largest / amax (numerics.md 2.1), optionally a power of two
  e8m0,       ///< one E8M0 byte, rounded up (numerics.md 4.1)
  two_level,  ///< one byte of kBlockScaleFormat under a float32 global amax (numerics.md 5.1)
};

inline constexpr Format kBlockScaleFormat = Format::e4m3;

/// What one scale covers along the outer dimension; along the contraction it covers FamilyRow::block elements.
enum class Scope : uint8_t { tensor, row, block };

/// A family is one row; code asks the row and never compares a family by name.
struct FamilyRow {
  std::string_view name;
  Format element;  ///< default element format
  ScaleKind scale;
  Scope scope;
  int64_t block;    ///< elements along the contraction that share a scale; 0: all of them
  bool transposed;  ///< columnwise codes are stored [K, M]; else [M, K] as the input
  bool has_amax;    ///< a float32 amax is stored beside the scales
};

inline constexpr std::array<FamilyRow, 6> kFamilies{{
    {"fp8_tensor", Format::e4m3, ScaleKind::f32, Scope::tensor, 0, true, true},
    {"fp8_row", Format::e4m3, ScaleKind::f32, Scope::row, 0, true, false},
    {"fp8_block", Format::e4m3, ScaleKind::f32, Scope::block, 128, true, false},
    {"mxfp8", Format::e4m3, ScaleKind::e8m0, Scope::block, 32, false, false},
    {"mxfp4", Format::e2m1, ScaleKind::e8m0, Scope::block, 32, true, false},
    {"nvfp4", Format::e2m1, ScaleKind::two_level, Scope::block, 16, true, true},
}};

/// A bit for each family.
constexpr unsigned family_bits(std::initializer_list<Family> families) {
  unsigned bits = 0;
  for (const Family f : families) bits |= 1u << static_cast<unsigned>(f);
  return bits;
}

/// An option of specs that asks for another element format than the family's own; its word is the format's name.
struct ElementOption {
  Format element;
  std::string_view meaning;
  unsigned families;  ///< that have it, as family_bits()
};

inline constexpr auto kElementOptions = std::to_array<ElementOption>({
    {Format::e5m2, "elements are E5M2 instead of E4M3",
     family_bits({Family::fp8_tensor, Family::fp8_row, Family::fp8_block, Family::mxfp8})},
});

/// Random Hadamard transform of 16 tokens before columnwise quantization (numerics.md 5.3, 0.10).
enum class Hadamard : uint8_t { off, signs, no_signs };

/// Choice between two block scales by error (numerics.md 5.8).
enum class FourOverSix : uint8_t { off, mae, mse };

/// What the global number of a two-level scale is (numerics.md 5.11).
enum class Global : uint8_t {
  amax,        ///< the amax that block scales follow from
  multiplier,  ///< the value of a code is code * (block scale * number)
  divisor,     ///< the value of a code is code * (block scale / number)
};

/// Immutable by convention: build it once, pass it by value, compare it with ==.
struct QuantSpec {
  Family family = Family::mxfp8;
  Format element = Format::e4m3;
  bool square = false;      ///< one scale per block x block tile, shared by both directions
  bool pow2 = false;        ///< float32 scales are truncated to powers of two
  float epsilon = 0;        ///< amax is at least this (float32 scales)
  bool row_scaled = false;  ///< one global amax per row (columnwise: per column)
  Hadamard hadamard = Hadamard::off;
  bool stochastic = false;  ///< stochastic rounding of elements; needs a seed (numerics.md 5.6, 0.11)
  FourOverSix four_over_six = FourOverSix::off;
  bool block_scale_max_256 = false;  ///< block scales reach 256 instead of 448 (with four_over_six)
  Global global = Global::amax;      ///< what is stored in the amax buffer, and how it makes values
  bool given = false;                ///< the scale of the tensor is an operand (numerics.md 2.5, 5.9)
  bool swizzled = false;             ///< scales padded and tiled 128x4 (numerics.md 4.5)
  bool nan = false;                  ///< scales of what holds NaN or Inf are NaN (numerics.md 1.9)
  bool interleaved = false;          ///< codes and scales of a byte in tiles of 16 lines x 4 bytes (numerics.md 2.4)

  /// Text as in docs/specs.md, e.g. "nvfp4:rht:sr". Throws Error pointing at the wrong part and listing what is
  /// allowed.
  static QuantSpec parse(std::string_view text);
  /// Canonical: parse(s.to_string()) == s, defaults left out, options in the order of docs/specs.md.
  std::string to_string() const;
  friend std::ostream& operator<<(std::ostream& out, const QuantSpec& s);

  bool operator==(const QuantSpec&) const = default;

  /// The same numbers with codes in the other order: interleaved, or plain.
  constexpr QuantSpec reordered() const {
    QuantSpec other = *this;
    other.interleaved = !interleaved;
    return other;
  }

  /// The FamilyRow and the FormatRow.
  constexpr decltype(auto) row() const { return entry<kFamilies>(static_cast<size_t>(family)); }
  constexpr decltype(auto) element_row() const { return quire::row(element); }
  constexpr bool packed() const { return element_row().packed(); }
  /// The largest two-level block scale: 448, or 256.
  constexpr float block_scale_max() const { return block_scale_max_256 ? 256.0f : 448.0f; }
};

/// The table of docs/specs.md as text, one line per option: family list, option, meaning. Generated from the parser's
/// rows.
std::string spec_grammar();

}  // namespace quire
