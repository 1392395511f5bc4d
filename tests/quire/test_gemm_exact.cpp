// Products whose every step is exact up to one rounding: all bits must be those of the reference. Any rounding inside a
// block, any other place for bias or addend, or a second rounding would show.
#include "products.h"
#include "quire/format/codec.h"
#include "quire/operations/operations.h"
#include "quire/spec/scale_index.h"

namespace quire::testing {
namespace {

constexpr std::string_view kSpecs[] = {"fp8_tensor",
                                       "fp8_row",
                                       "fp8_block",
                                       "fp8_block:128x128",
                                       "mxfp8",
                                       "mxfp8:swizzled",
                                       "mxfp4",
                                       "mxfp4:swizzled",
                                       "nvfp4",
                                       "nvfp4:swizzled",
                                       "nvfp4:row_scaled",
                                       "nvfp4:4over6=mae:256"};
constexpr Direction kDirections[] = {Direction::rowwise, Direction::columnwise};

/// How a test fills an operand: the value of element (outer, l), the scale of (outer, block), the amax of an outer.
struct Filling {
  std::function<float(int64_t o, int64_t l)> value;
  std::function<float(int64_t o, int64_t b)> scale;
  std::function<float(int64_t o)> amax = [](int64_t) { return 1.0f; };
};

void put_code(const QuantSpec& spec, uint8_t* data, int64_t index, int code) {
  if (!spec.packed()) {
    data[index] = static_cast<uint8_t>(code);
  } else {
    uint8_t& byte = data[index / 2];
    byte = index % 2 ? pack(byte, static_cast<unsigned>(code)) : pack(static_cast<unsigned>(code), byte >> 4);
  }
}

void put_scale(const QuantSpec& spec, void* buffer, int64_t index, float scale) {
  const ScaleKind kind = spec.row().scale;
  if (kind == ScaleKind::f32) static_cast<float*>(buffer)[index] = scale;
  if (kind == ScaleKind::two_level)
    static_cast<uint8_t*>(buffer)[index] = static_cast<uint8_t>(encode(Format::e4m3, scale));
  if (kind == ScaleKind::e8m0)
    static_cast<uint8_t*>(buffer)[index] = static_cast<uint8_t>(127 + std::lround(std::log2(scale)));
}

OwnedOperand filled(const QuantSpec& spec, Direction d, const ProductShape& s, const Filling& f) {
  const bool columnwise = d == Direction::columnwise;
  auto q = std::make_unique<Quantized>(spec, columnwise ? s.k : s.m, columnwise ? s.m : s.k);
  QuantizedSide& side = q->side(d);
  const int64_t blocks = block_count(spec, s.k);
  for (int64_t o = 0; o < s.m; ++o) {
    for (int64_t l = 0; l < s.k; ++l)
      put_code(spec, side.data.as<uint8_t>(), data_index({spec, d, s.m, s.k}, o, l),
               encode(spec.element, f.value(o, l)));
    for (int64_t b = 0; b < blocks; ++b)
      put_scale(spec, side.scale.data(), scale_index({spec, d, s.m, blocks}, o, b), f.scale(o, b));
    if (spec.row().has_amax) side.amax.as<float>()[amax_index(spec, o)] = f.amax(o);
  }
  return {std::move(q), d};
}

/// Quarters up to 3, under powers of two: sums stay far below 2^24 units, so float32 holds them.
Filling small_numbers(uint64_t seed, const QuantSpec& spec) {
  auto r = std::make_shared<Random>(seed);
  const bool per_tensor = spec.row().scope == Scope::tensor;
  return {.value = [r](int64_t, int64_t) { return static_cast<float>(static_cast<int64_t>(r->below(13)) - 6) * 0.5f; },
          .scale = [r, per_tensor](
                       int64_t,
                       int64_t) { return per_tensor ? 0.5f : std::ldexp(1.0f, static_cast<int>(r->below(5)) - 2); },
          .amax = [](int64_t o) { return std::ldexp(1.0f, 11 + static_cast<int>(o % 3)); }};
}

TEST(GemmExact, SumsThatFloat32HoldsHaveTheBitsOfTheReferenceThroughEveryEpilogue) {
  const std::optional<DType> biases[] = {std::nullopt, DType::f32, DType::bf16, DType::f16};
  uint64_t turn = 0;
  for (const std::string_view spec_text : kSpecs)
    for (const Direction a_direction : kDirections)
      for (const Direction b_direction : kDirections)
        for (const ProductShape& s : {ProductShape{13, 37, 150}, ProductShape{1, 1, 3}, ProductShape{40, 19, 257}})
          for (const DType out : kFloatTypes) {
            const QuantSpec spec = QuantSpec::parse(spec_text);
            ++turn;
            const OwnedOperand a = filled(spec, a_direction, s, small_numbers(turn, spec));
            const OwnedOperand b = filled(spec, b_direction, {s.n, s.m, s.k}, small_numbers(turn + 1, spec));
            // The constant of NVFP4 is no power of two: its product is rounded already, so that a bias would be the
            // second.
            const bool rounded = spec.row().scale == ScaleKind::two_level;
            const Epilogue e{.out = out,
                             .bias = rounded ? std::nullopt : biases[turn % 4],
                             .addend = turn % 3 == 0,
                             .padding = turn % 2 ? 5 : 0};
            Product expected(a.view(), b.view(), e), actual(a.view(), b.view(), e);
            expected.run(reference_runner());
            actual.run(active_runner());
            ASSERT_EQ(difference(expected.out(), actual.out()), "")
                << product_text(a.view(), b.view()) << " to " << name(out) << ", turn " << turn;
          }
}

TEST(GemmExact, BlockSumsAreExactSoThatCancellingTermsLeaveZero) {
  // 3 - 2 - 1 = 0 on either side, but 3 times a scale of full precision is rounded where 2 times and 1 times are not.
  constexpr float kLeft[] = {3, -2, -1, 0, 1, 1, 1, 0}, kRight[] = {1, 1, 1, 2, 3, -2, -1, 2};
  auto r = std::make_shared<Random>(5);
  const auto noisy = [r](int64_t, int64_t) { return static_cast<float>(1 + r->uniform()) * 0.37f; };
  const auto amax = [](int64_t o) { return 1.7390213f + static_cast<float>(o) * 0.013f; };
  for (const std::string_view spec_text : kSpecs)
    for (const Direction d : kDirections) {
      const QuantSpec spec = QuantSpec::parse(spec_text);
      const ProductShape s{14, 35, 160};
      const OwnedOperand a = filled(spec, d, s, {[&](int64_t, int64_t l) { return kLeft[l % 8]; }, noisy, amax});
      const OwnedOperand b =
          filled(spec, d, {s.n, s.m, s.k}, {[&](int64_t, int64_t l) { return kRight[l % 8]; }, noisy, amax});
      Product actual(a.view(), b.view(), {});
      actual.run(active_runner());
      for (int64_t i = 0; i < s.m; ++i)
        for (int64_t j = 0; j < s.n; ++j)
          ASSERT_EQ(actual.at(i, j), 0.0f) << spec_text << " element " << i << ", " << j;
    }
}

TEST(GemmExact, OneBlockOfAnyFourBitCodesIsRoundedOnce) {
  Random r(9);
  for (const std::string_view spec_text :
       {"nvfp4", "nvfp4:swizzled", "nvfp4:row_scaled", "nvfp4:4over6=mae:256", "mxfp4", "mxfp4:swizzled"})
    for (int repeat = 0; repeat < 20; ++repeat) {
      const QuantSpec spec = QuantSpec::parse(spec_text);
      const ProductShape s{14, 35, spec.row().block};
      const auto code = [&](int64_t, int64_t) { return decode(Format::e2m1, static_cast<int>(r.below(16))); };
      // Any E4M3 scale from 2^-6 up, or any power of two: the product of two has at most 8 bits.
      const auto scale = [&](int64_t, int64_t) {
        return spec.row().scale == ScaleKind::two_level ? decode(Format::e4m3, static_cast<int>(8 + r.below(119)))
                                                        : std::ldexp(1.0f, static_cast<int>(r.below(41)) - 20);
      };
      const auto amax = [](int64_t o) { return std::ldexp(1.0f, static_cast<int>(o % 5) - 2); };
      const OwnedOperand a = filled(spec, Direction::rowwise, s, {code, scale, amax});
      const OwnedOperand b = filled(spec, Direction::rowwise, {s.n, s.m, s.k}, {code, scale, amax});
      Product expected(a.view(), b.view(), {}), actual(a.view(), b.view(), {});
      expected.run(reference_runner());
      actual.run(active_runner());
      ASSERT_EQ(difference(expected.out(), actual.out()), "") << spec_text;
    }
}

TEST(GemmExact, AnEmptyContractionGivesBiasPlusAddend) {
  for (const Runner& runner : {reference_runner(), active_runner()})
    for (const std::string_view spec_text : kSpecs)
      for (const Direction d : kDirections) {
        SCOPED_TRACE(text(runner.name, " ", spec_text));
        const QuantSpec spec = QuantSpec::parse(spec_text);
        const Filling nothing = small_numbers(1, spec);
        const OwnedOperand a = filled(spec, d, {9, 20, 0}, nothing), b = filled(spec, d, {20, 9, 0}, nothing);
        Product plain(a.view(), b.view(), {}), added(a.view(), b.view(), {.bias = DType::bf16, .addend = true});
        plain.run(runner);
        added.run(runner);
        for (int64_t i = 0; i < 9; ++i)
          for (int64_t j = 0; j < 20; ++j) {
            ASSERT_EQ(plain.at(i, j), 0.0f);
            ASSERT_EQ(added.at(i, j), static_cast<float>(added.bias(j)) + static_cast<float>(added.addend(i, j)));
          }
      }
}

TEST(GemmExact, AnEmptyOutputIsLeftAlone) {
  for (const std::string_view spec_text : kSpecs) {
    const QuantSpec spec = QuantSpec::parse(spec_text);
    const Filling numbers = small_numbers(1, spec);
    for (const ProductShape& s : {ProductShape{0, 20, 40}, ProductShape{20, 0, 40}, ProductShape{0, 0, 0}}) {
      const OwnedOperand a = filled(spec, Direction::rowwise, s, numbers);
      const OwnedOperand b = filled(spec, Direction::rowwise, {s.n, s.m, s.k}, numbers);
      Product(a.view(), b.view(), {.bias = DType::f32, .addend = true}).run(active_runner());
    }
  }
}

TEST(GemmExact, TheAddendMayBeTheOutputItself) {
  for (const DType out : kFloatTypes) {
    const QuantSpec spec = QuantSpec::parse("mxfp8");
    const ProductShape s{15, 33, 70};
    const OwnedOperand a = filled(spec, Direction::rowwise, s, small_numbers(1, spec));
    const OwnedOperand b = filled(spec, Direction::rowwise, {s.n, s.m, s.k}, small_numbers(2, spec));
    Epilogue e;
    e.out = out;
    e.addend = true;
    Product apart(a.view(), b.view(), e), inside(a.view(), b.view(), e);
    apart.run(active_runner());
    GemmProblem p = inside.problem();
    std::memcpy(p.out.data, p.addend, static_cast<size_t>(inside.out().size()));
    p.addend = p.out.data;
    active_runner().run.gemm(p);
    EXPECT_EQ(difference(apart.out(), inside.out()), "") << name(out);
  }
}

}  // namespace
}  // namespace quire::testing
