// The choice between two block scales where it is hardest: at the float at which one error overtakes the other.
#include <bit>
#include <cmath>

#include "inputs.h"
#include "quantized.h"
#include "quire/format/codec.h"
#include "quire/operations/operations.h"
#include "quire/spec/scale.h"

namespace quire::testing {
namespace {

constexpr float kTileAmax = 1.9f, kGlobalAmax = 4.0f;

/// A tile of 16 lines of 16; lines run along K rowwise and along M columnwise.
using TileValues = std::array<std::array<float, 16>, 16>;

/// numerics.md 5.8 written out for one candidate: bytes, multipliers and errors of a tile.
class Candidates {
 public:
  Candidates(const QuantSpec& spec, float global_amax, float tile_amax) : spec_(spec), amax_(global_amax) {
    const float most = spec.block_scale_max();
    const float encode_scale = most * 6.0f / global_amax, decode_scale = 1.0f / encode_scale;
    const float base = tile_amax / 6.0f * encode_scale;
    const float targets[] = {std::min(base * 1.5f, 448.0f), std::min(base, 448.0f)};
    for (size_t i = 0; i < 2; ++i) {
      byte_[i] = static_cast<uint8_t>(encode(Format::e4m3, targets[i]));
      multiplier_[i] = 1.0f / (decode(Format::e4m3, byte_[i]) * decode_scale);
    }
  }

  /// The byte chosen for `count` lines.
  uint8_t choose(const TileValues& tile, size_t count) const {
    float total[2];
    for (size_t c = 0; c < 2; ++c) {
      float e[16];
      for (size_t i = 0; i < 16; ++i) e[i] = i < count ? error(tile[i], c) : 0.0f;
      const float h[] = {e[0] + e[8],  e[1] + e[9],  e[2] + e[10], e[3] + e[11],
                         e[4] + e[12], e[5] + e[13], e[6] + e[14], e[7] + e[15]};
      total[c] = ((h[0] + h[4]) + (h[2] + h[6])) + ((h[1] + h[5]) + (h[3] + h[7]));
    }
    return total[0] < total[1] ? byte_[0] : byte_[1];
  }

 private:
  float error(const std::array<float, 16>& line, size_t candidate) const {
    float sum = 0;
    for (const float x : line) {
      const float code = decode(Format::e2m1, encode(Format::e2m1, x * multiplier_[candidate]));
      const float d = code * decode(Format::e4m3, byte_[candidate]) * amax_ / (6.0f * spec_.block_scale_max()) - x;
      sum += spec_.four_over_six == FourOverSix::mae ? std::fabs(d) : d * d;
    }
    return sum;
  }

  QuantSpec spec_;
  float amax_;
  std::array<uint8_t, 2> byte_;
  std::array<float, 2> multiplier_;
};

/// A tile whose values lie close to the grid that a scale for 4, or for 6, gives; line 9 holds the amax.
TileValues tile_for(int largest, uint64_t seed) {
  Random signs(seed), noise(seed + static_cast<uint64_t>(largest));
  TileValues t;
  for (auto& line : t)
    for (float& x : line) {
      const float point = decode(Format::e2m1, static_cast<int>(noise.below(largest == 4 ? 7 : 8)));
      x = std::fabs(point * kTileAmax / static_cast<float>(largest) + static_cast<float>(noise.normal()) * 0.05f);
      x = std::min(x, 1.8f) * (signs.below(2) ? 1.0f : -1.0f);
    }
  t[9][2] = kTileAmax;
  return t;
}

TileValues transposed(const TileValues& t) {
  TileValues out;
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 16; ++j) out[j][i] = t[i][j];
  return out;
}

class FourOverSixChoice : public EveryRunner {
 protected:
  /// Compares the scale bytes of a tile in both directions, or of its line 9 alone, in a tensor with a larger amax
  /// elsewhere.
  void expect_choices(const QuantSpec& spec, const TileValues& tile, size_t lines) const {
    const Candidates candidates(spec, kGlobalAmax, kTileAmax);
    const TileValues chosen_from = lines == 1 ? TileValues{tile[9]} : tile;
    std::array<float, 32 * 16> x{};
    std::memcpy(x.data(), chosen_from.data(), sizeof chosen_from);
    x.back() = kGlobalAmax;
    const Quantized q = quantized(GetParam(), spec, {x.data(), DType::f32, 32, 16, 16});
    const auto byte = [&](Direction d) { return int{q.side(d).scale.as<uint8_t>()[0]}; };
    ASSERT_EQ(byte(Direction::rowwise), int{candidates.choose(chosen_from, lines)});
    if (lines == 1) return;
    ASSERT_EQ(byte(Direction::columnwise), int{candidates.choose(transposed(tile), 16)});
  }
};

/// The largest n in [low, high) with property(n) == property(low), found by bisection; it differs at n + 1.
template <class Property>
uint32_t last_alike(uint32_t low, uint32_t high, const Property& property) {
  const auto first = property(low);
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (property(middle) == first ? low : high) = middle;
  }
  return low;
}

/// Replaces elements of `tile`, one after another, by those of `other` until the choice flips, and moves the one at
/// which it does to the float next to the flip. Returns that element.
template <class Choose>
float* find_flip(TileValues& tile, const TileValues& other, const Choose& choose) {
  const TileValues start = tile;
  const auto mixed = [&](uint32_t count) {
    for (uint32_t i = 0; i < 256; ++i) tile[i / 16][i % 16] = (i < count ? other : start)[i / 16][i % 16];
    return choose(tile);
  };
  if (mixed(0) == mixed(256)) return nullptr;
  const uint32_t count = last_alike(0, 256, mixed);
  mixed(count);
  float& free = tile[count / 16][count % 16];
  const float sign = std::signbit(free) ? -1.0f : 1.0f, from = std::fabs(free),
              to = std::fabs(other[count / 16][count % 16]);
  const bool down = from > to;
  const auto moved = [&](uint32_t steps) {
    free = sign * std::bit_cast<float>(std::bit_cast<uint32_t>(from) + (down ? 0 - steps : steps));
    return choose(tile);
  };
  const uint32_t a = std::bit_cast<uint32_t>(from), b = std::bit_cast<uint32_t>(to);
  moved(last_alike(0, down ? a - b : b - a, moved));
  return &free;
}

TEST_P(FourOverSixChoice, FlipsAtTheFloatWhereTheContractFlips) {
  for (const std::string mode : {"mae", "mse"})
    for (const std::string options : {"", ":256"})
      for (const bool square : {false, true}) {
        const QuantSpec spec = QuantSpec::parse((square ? "nvfp4:16x16:4over6=" : "nvfp4:4over6=") + mode + options);
        const Candidates candidates(spec, kGlobalAmax, kTileAmax);
        const size_t lines = square ? 16 : 1;
        int flips = 0;
        for (uint64_t seed = 0; seed < 50; ++seed) {
          TileValues tile = tile_for(4, seed);
          float* free = find_flip(tile, tile_for(6, seed), [&](const TileValues& t) {
            return candidates.choose(square ? t : TileValues{t[9]}, lines);
          });
          if (free == nullptr) continue;
          ++flips;
          const uint32_t at = std::bit_cast<uint32_t>(*free);
          for (uint32_t step = 0; step < 5; ++step) {
            *free = std::bit_cast<float>(at + step - 2);
            SCOPED_TRACE(text(spec.to_string(), ", tile ", seed, ", step ", step));
            expect_choices(spec, tile, lines);
            if (HasFatalFailure()) return;
          }
        }
        EXPECT_GE(flips, 30) << spec.to_string();
      }
}

TEST_P(FourOverSixChoice, IsSixForZerosInfinitiesAndNans) {
  for (const float value : {0.0f, HUGE_VALF, std::bit_cast<float>(0x7FC00000u)})
    for (const std::string_view text : {"nvfp4:4over6=mae", "nvfp4:16x16:4over6=mse"}) {
      const QuantSpec spec = QuantSpec::parse(text);
      std::array<float, 256> x{};
      x.fill(std::isnan(value) ? 1.0f : 0.0f);
      x[0] = value;
      const Quantized q = quantized(GetParam(), spec, {x.data(), DType::f32, 16, 16, 16});
      const float g = std::isnan(value) ? 1.0f : value;
      const GlobalScale scale = global_scale(g, spec.block_scale_max());
      const int expected = encode(Format::e4m3, std::min(g / 6.0f * scale.encode, 448.0f));
      EXPECT_EQ(int{q.side(Direction::rowwise).scale.as<uint8_t>()[0]}, expected) << text << " " << value;
      EXPECT_EQ(int{q.side(Direction::columnwise).scale.as<uint8_t>()[0]}, expected) << text << " " << value;
    }
}

TEST_P(FourOverSixChoice, IsThatOfEachLineAloneUnderRowScaledAmaxes) {
  constexpr int64_t rows = 37, cols = 53;
  std::vector<float> x(rows * cols), turned(rows * cols);
  Random random(7);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      turned[static_cast<size_t>(c * rows + r)] = x[static_cast<size_t>(r * cols + c)] =
          static_cast<float>(random.normal() * std::exp2(r % 5 - c % 3));
  for (const std::string options : {"4over6=mae", "4over6=mse:256", "4over6=mae:global=div"}) {
    const QuantSpec alone = QuantSpec::parse("nvfp4:" + options),
                    both = QuantSpec::parse("nvfp4:row_scaled:" + options);
    const Quantized q = quantized(GetParam(), both, {x.data(), DType::f32, rows, cols, cols});
    for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
      const bool by_rows = d == Direction::rowwise;
      const int64_t lines = by_rows ? rows : cols, length = by_rows ? cols : rows;
      for (int64_t line = 0; line < lines; ++line) {
        float* const own = (by_rows ? x : turned).data() + line * length;
        const Quantized one = quantized(GetParam(), alone, {own, DType::f32, 1, length, length});
        const auto& [data, scale, amax] = one.side(Direction::rowwise);
        const auto same = [&](const Guarded& all, const Guarded& part) {
          const size_t size = static_cast<size_t>(part.size());
          return std::memcmp(all.as<uint8_t>() + static_cast<size_t>(line) * size, part.as<uint8_t>(), size) == 0;
        };
        EXPECT_TRUE(same(q.side(d).data, data) && same(q.side(d).scale, scale) && same(q.side(d).amax, amax))
            << both.to_string() << ", line " << line << " of " << lines;
      }
    }
  }
}

QUIRE_FOR_EVERY_RUNNER(FourOverSixChoice);

}  // namespace
}  // namespace quire::testing
