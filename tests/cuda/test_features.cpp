// What nvcc makes of the kernels of features.cu, run by the emulator, against results that are computed here.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/device_arrays.h"
#include "quire/format/codec.h"
#include "quire/format/half.h"

namespace quire::testing {
namespace {

/// Of each test: kernels run in an order that a seed gives.
class Features : public ::testing::TestWithParam<uint64_t> {
 protected:
  template <class... T>
  void run(const std::string& name, emulator::Dim3 grid, emulator::Dim3 block, T... arguments) {
    launch(kernel_of("features.ptx", name), {grid, block, shared_, GetParam()}, memory_, arguments...);
  }
  template <class T>
  T* array(const std::vector<T>& values) {
    return device_array(memory_, values);
  }
  template <class T>
  T* zeros(std::size_t count) {
    return array(std::vector<T>(count));
  }
  std::vector<int> integers(std::size_t count, int most) {
    std::vector<int> all(count);
    for (int& x : all) x = static_cast<int>(dice_() % static_cast<unsigned>(most));
    return all;
  }

  emulator::HostMemory memory_;
  std::size_t shared_ = 0;
  std::mt19937 dice_{7};
};

INSTANTIATE_TEST_SUITE_P(Orders, Features, ::testing::Values(0, 1, 2));

TEST_P(Features, BlocksAndThreadsKnowTheirPlacesInThreeDimensions) {
  const emulator::Dim3 grid{3, 2, 2}, block{5, 4, 3};
  auto* out = zeros<uint32_t>(12 * 60);
  run("places", grid, block, out);
  std::size_t n = 0;
  for (unsigned bz = 0; bz < 2; ++bz)
    for (unsigned by = 0; by < 2; ++by)
      for (unsigned bx = 0; bx < 3; ++bx)
        for (unsigned z = 0; z < 3; ++z)
          for (unsigned y = 0; y < 4; ++y)
            for (unsigned x = 0; x < 5; ++x, ++n)
              ASSERT_EQ(out[n], x | y << 4 | z << 8 | bx << 12 | by << 16 | bz << 20) << n;
}

TEST_P(Features, SharedMemoryHandsValuesFromThreadToThread) {
  std::vector<int> x(1024);
  std::iota(x.begin(), x.end(), 3);
  auto* out = zeros<int>(x.size());
  run("reverse_by_static_memory", {4}, {256}, array(x), out);
  for (int i = 0; i < 1024; ++i) EXPECT_EQ(out[i], i / 256 * 256 + 255 - i % 256 + 3);

  std::vector<uint8_t> bytes(1000);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(dice_());
  std::vector<uint32_t> words(250);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  auto* sum = zeros<uint32_t>(1);
  shared_ = 1000;
  run("gather_by_dynamic_memory", {1}, {96}, array(bytes), sum, 1000);
  EXPECT_EQ(*sum, std::accumulate(words.begin(), words.end(), 0u));
}

TEST_P(Features, LanesShuffleTheirValues) {
  std::vector<uint32_t> x(32);
  for (uint32_t& v : x) v = static_cast<uint32_t>(dice_());
  auto* out = zeros<uint32_t>(160);
  run("shuffles", {1}, {32}, array(x), out);
  for (unsigned lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(out[lane], x[lane < 3 ? lane : lane - 3]);
    EXPECT_EQ(out[32 + lane], x[lane % 16 + 5 < 16 ? lane + 5 : lane]);
    EXPECT_EQ(out[64 + lane], x[lane ^ 9]);
    EXPECT_EQ(out[96 + lane], x[lane / 8 * 8 + lane * 7 % 8]);
    if (lane < 12) {
      EXPECT_EQ(out[128 + lane], x[11 - lane]);
    }
  }
}

TEST_P(Features, LanesAndThreadsVote) {
  const std::vector<int> x = integers(32, 9);
  auto* out = zeros<unsigned>(224);
  run("votes", {1}, {32}, array(x), out);
  unsigned above = 0, differing = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    above |= unsigned{x[lane] > 3} << lane, differing ^= static_cast<unsigned>(x[lane]);
  const auto count = [&](int v) { return std::count(x.begin(), x.end(), v); };
  for (unsigned lane = 0; lane < 32; ++lane) {
    unsigned same = 0;
    for (unsigned other = 0; other < 32; ++other) same |= unsigned{x[other] == x[lane]} << other;
    EXPECT_EQ(out[lane], above);
    EXPECT_EQ(out[32 + lane], 1u | (count(7) ? 2u : 0u) | (count(0) ? 0u : 4u));
    EXPECT_EQ(out[64 + lane], same);
    EXPECT_EQ(out[96 + lane], static_cast<unsigned>(std::accumulate(x.begin(), x.end(), 0)));
    EXPECT_EQ(out[128 + lane], static_cast<unsigned>(-*std::min_element(x.begin(), x.end())));
    EXPECT_EQ(out[160 + lane], differing);
    EXPECT_EQ(out[192 + lane], 0xFFFFFFFFu + 1);
  }
  const std::vector<int> y = integers(100, 9);
  auto* counts = zeros<int>(100);
  run("counts", {1}, {100}, array(y), counts);
  const auto more = std::count_if(y.begin(), y.end(), [](int v) { return v > 3; });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(counts[i], more * 4 + (more == 100) * 2 + (more > 0));
}

TEST_P(Features, NamedBarriersAndWarpBarriersOrderWhatThreadsDo) {
  const std::vector<int> x = integers(64 * 7, 1000);
  for (const int rounds : {1, 2, 3, 4, 5, 7}) {
    auto* out = zeros<int>(x.size());
    run("hand_over", {1}, {128}, array(x), out, rounds);
    for (int i = 0; i < 64 * rounds; ++i) EXPECT_EQ(out[i], x[static_cast<size_t>(i / 64 * 64 + 63 - i % 64)]);
  }
  auto* fives = array(std::vector<int>(33));
  fives[32] = 5;
  run("arrives_and_goes_on", {1}, {64}, fives);
  EXPECT_EQ(std::count(fives, fives + 32, 5), 32);
  auto* sums = zeros<int>(4);
  run("sums_of_warps", {1}, {128}, array(x), sums);
  for (int w = 0; w < 4; ++w) EXPECT_EQ(sums[w], std::accumulate(x.begin() + 32 * w, x.begin() + 32 * w + 32, 0));
}

TEST_P(Features, AtomicOperationsGiveTheSameInAnyOrder) {
  const std::vector<int> x = integers(192, 500);
  const int sum = std::accumulate(x.begin(), x.end(), 0), most = *std::max_element(x.begin(), x.end());
  std::vector<uint32_t> words(9);
  words[3] = 0xFFFFFFFF;
  words[8] = 1u << 30;  // no x
  uint32_t bits = 0, differing = 0;
  for (const int v : x) bits |= 1u << v % 32, differing ^= static_cast<uint32_t>(v);
  auto* to = array(words);
  auto* wide = array(std::vector<uint64_t>{uint64_t{1} << 40, static_cast<uint64_t>(-1000)});
  auto* real = zeros<float>(1);
  auto* real64 = zeros<double>(1);
  run("atomics", {3}, {64}, array(x), to, wide, real, real64);
  EXPECT_EQ(to[0], static_cast<uint32_t>(sum));
  EXPECT_EQ(to[1], static_cast<uint32_t>(most));
  EXPECT_EQ(to[2], static_cast<uint32_t>(-most));
  EXPECT_EQ(to[3], ~bits);
  EXPECT_EQ(to[4], bits);
  EXPECT_EQ(to[5], differing);
  EXPECT_EQ(to[6], 192u % 10);
  EXPECT_EQ(to[7], std::count(x.begin(), x.end(), 5) ? 77u : 0u);
  EXPECT_EQ(to[8], 1u << 30);
  EXPECT_EQ(wide[0], (uint64_t{1} << 40) + (static_cast<uint64_t>(sum) << 30));
  EXPECT_EQ(wide[1], static_cast<uint64_t>(-*std::min_element(x.begin(), x.end())));
  EXPECT_EQ(*real, static_cast<float>(sum));
  EXPECT_EQ(*real64, 0.5 * sum);
}

TEST_P(Features, AThreadThatWaitsInALoopLetsOthersRun) {
  auto* flag = zeros<int>(1);
  auto* out = zeros<int>(1);
  run("waits_for_another_thread", {1}, {64}, flag, out);
  EXPECT_EQ(*out, 17);
}

TEST_P(Features, VectorsTablesAndFunctions) {
  struct Float4 {
    float x, y, z, w;
  };
  struct Uint2 {
    unsigned x, y;
  };
  std::vector<Float4> x(32);
  std::vector<Uint2> y(32);
  for (unsigned i = 0; i < 32; ++i) {
    const auto f = static_cast<float>(i);
    x[i] = {f, f + 0.5f, f + 1.5f, -f}, y[i] = {i, 100 + i};
  }
  auto* out = zeros<Float4>(32);
  auto* out2 = zeros<Uint2>(32);
  run("vectors", {1}, {32}, array(x), array(y), out, out2);
  const std::vector<int> index = integers(32, 8);
  auto* primes = zeros<int>(32);
  auto* real = zeros<float>(32);
  run("tables", {1}, {32}, array(index), primes, real);
  auto* results = zeros<uint64_t>(64);
  struct Triple {
    int64_t a;
    int b;
    float c;
  };
  auto* triples = zeros<Triple>(32);
  run("functions", {1}, {32}, array(index), results, triples);
  constexpr std::array<int, 8> kPrimes{2, 3, 5, 7, 11, 13, 17, 19};
  constexpr std::array<float, 4> kHalves{0.5f, 1.5f, -2.5f, 3.5f};
  for (unsigned i = 0; i < 32; ++i) {
    EXPECT_TRUE(out[i].x == x[i].w && out[i].y == x[i].z && out[i].z == x[i].y && out[i].w == x[i].x) << i;
    EXPECT_TRUE(out2[i].x == y[i].y && out2[i].y == y[i].x) << i;
    const int n = index[i];
    EXPECT_EQ(primes[i], kPrimes[static_cast<size_t>(n)]);
    EXPECT_EQ(real[i], kHalves[static_cast<size_t>(n % 4)]);
    uint64_t factorial = 1;
    for (int k = 2; k <= n; ++k) factorial *= static_cast<uint64_t>(k);
    EXPECT_EQ(results[i], factorial);
    EXPECT_EQ(triples[i].a, 2 * n + 3);
    EXPECT_EQ(triples[i].b, n - 3);
    EXPECT_EQ(triples[i].c, 1.5f * static_cast<float>(n) * 3);
    EXPECT_EQ(results[32 + i], static_cast<uint64_t>(n + n * 3 % 10));
  }
}

TEST_P(Features, ASwitchTakesTheCaseOfEachThread) {
  const std::vector<int> x = integers(32, 9);
  std::vector<int> memory(44);
  memory[38] = 100, memory[39] = 50;
  auto* out = array(memory);
  run("switches", {1}, {32}, array(x), out);
  for (unsigned i = 0; i < 32; ++i) {
    const int expected[] = {5, 50, 13, 1, -7, 5 << 9, 33, -1, -1};
    EXPECT_EQ(out[i], expected[x[i]]) << x[i];
  }
  const auto count = [&](int v) { return static_cast<int>(std::count(x.begin(), x.end(), v)); };
  EXPECT_EQ(out[40], count(0));
  EXPECT_EQ(out[42], 4 * count(3));
  EXPECT_EQ(out[43], 2 * count(4));
}

TEST_P(Features, BitsAndWideIntegers) {
  std::vector<uint32_t> x{0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 1u << 31, 1};
  while (x.size() < 64) x.push_back(static_cast<uint32_t>(dice_()));
  auto* out = zeros<uint32_t>(16 * 32);
  run("bits", {1}, {32}, array(x), out);
  for (unsigned i = 0; i < 32; ++i) {
    const uint32_t a = x[2 * i], b = x[2 * i + 1], *to = out + 16 * i;
    const uint64_t both = uint64_t{b} << 32 | a;
    const auto byte = [&](unsigned n) { return static_cast<uint32_t>(both >> 8 * n & 255); };
    EXPECT_EQ(to[0], byte(5) | byte(1) << 8 | byte(7) << 16 | byte(3) << 24);
    EXPECT_EQ(to[1], static_cast<uint32_t>(both << 13 >> 32));
    EXPECT_EQ(to[2], static_cast<uint32_t>(both >> 7));
    EXPECT_EQ(to[3], static_cast<uint32_t>(std::countl_zero(a >> 5)));
    EXPECT_EQ(to[4],
              static_cast<uint32_t>(std::popcount(a)) << 8 | (b ? static_cast<uint32_t>(std::countr_zero(b)) + 1 : 0));
    uint32_t reversed = 0, unsigned_dot = 9;
    int dot = -5;
    for (int n = 0; n < 32; ++n) reversed |= (a >> n & 1) << (31 - n);
    for (int n = 0; n < 32; n += 8)
      dot += int{static_cast<int8_t>(a >> n)} * static_cast<int8_t>(b >> n),
          unsigned_dot += (a >> n & 255) * (b >> n & 255);
    EXPECT_EQ(to[5], reversed);
    EXPECT_EQ(to[6], static_cast<uint32_t>(dot));
    EXPECT_EQ(to[7], unsigned_dot);
    EXPECT_EQ(to[8], static_cast<uint32_t>(static_cast<int>(a << 18) >> 23));
    EXPECT_EQ(to[9], a ^ b ^ a >> 3);
    EXPECT_EQ(to[10], static_cast<uint32_t>(uint64_t{a} * b >> 32));
    EXPECT_EQ(to[11], static_cast<uint32_t>(int64_t{static_cast<int>(a)} * static_cast<int>(b) >> 32));
    const unsigned __int128 wide = static_cast<unsigned __int128>(uint64_t{a} << 32 | b) * both + a;
    for (unsigned n = 0; n < 4; ++n) EXPECT_EQ(to[12 + n], static_cast<uint32_t>(wide >> (96 - 32 * n)));
  }
}

TEST_P(Features, RoundingsOfFloatsAreThoseOfIeee) {
  std::vector<float> x{0.0f, -0.0f, 1e-40f, 3.0f, 2.5f, -3.5f, 1e30f, 1e30f, 0.3f, 0.7f};
  while (x.size() < 64)
    x.push_back(std::ldexp(static_cast<float>(dice_() % 100000) / 3000.0f - 16, static_cast<int>(dice_() % 9)));
  auto* out = zeros<float>(12 * 32);
  auto* wide = zeros<double>(4 * 32);
  auto* integers = zeros<int>(3 * 32);
  auto* integers64 = zeros<int64_t>(32);
  run("roundings", {1}, {32}, array(x), out, wide, integers, integers64);
  for (unsigned i = 0; i < 32; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1], *to = out + 12 * i;
    const auto directed = [&](int direction, bool adds) {
      std::fesetround(direction);
      volatile float p = a, q = b, r = adds ? p + q : p * q;
      std::fesetround(FE_TONEAREST);
      return r;
    };
    const auto same = [&](float expected, unsigned n) {
      if (!std::isnan(expected)) {
        EXPECT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(to[n])) << n << " of " << a << ", " << b;
      }
    };
    same(directed(FE_TOWARDZERO, true), 0), same(directed(FE_UPWARD, true), 1), same(directed(FE_DOWNWARD, false), 2);
    same(std::fma(a, b, a), 3), same(a / b, 4), same(std::sqrt(std::fabs(a)), 5), same(std::floor(a), 6);
    same(std::nearbyint(a), 7), same(std::min(std::max(a + 0.0f, 0.0f), 1.0f), 8), same(1 / b, 9);
    same(std::copysign(a, b), 11);
    if (a != b) same(std::max(a, b), 10);
    EXPECT_EQ(wide[4 * i], double{a} * b);
    EXPECT_EQ(wide[4 * i + 1], std::fma(double{a}, double{b}, 1e-9));
    EXPECT_EQ(wide[4 * i + 2], std::sqrt(std::fabs(double{b})));
    if (b != 0) {
      EXPECT_EQ(wide[4 * i + 3], double{a} / b);
    }
    const auto limited = [](double v) { return static_cast<int>(std::clamp(v, -2147483648.0, 2147483647.0)); };
    EXPECT_EQ(integers[3 * i], limited(std::nearbyint(double{a})));
    EXPECT_EQ(integers[3 * i + 1], limited(std::ceil(double{b})));
    if (a < 2e9f) {
      EXPECT_EQ(integers[3 * i + 2], static_cast<int>(std::max(a, 0.0f)));
    }
    if (a < 1e9f) {
      EXPECT_EQ(integers64[i], static_cast<int64_t>(std::floor(double{a} * 65536.5)));
    }
  }
}

TEST_P(Features, NumbersOfSixteenAndEightBitsAreThoseOfTheFormats) {
  std::vector<float> x{0.0f,   -0.0f,  1e-40f,   INFINITY, -INFINITY, NAN,
                       448.0f, 464.0f, 65504.0f, 65520.0f, 57344.0f,  61440.0f};
  while (x.size() < 20000)
    x.push_back(std::ldexp(static_cast<float>(dice_() % 4097) / 256 - 8, static_cast<int>(dice_() % 40) - 26));
  const auto count = static_cast<unsigned>(x.size() / 2) / 100;
  auto* out = zeros<uint16_t>(2 * x.size());
  auto* pairs = zeros<uint32_t>(2 * x.size());
  auto* back = zeros<float>(x.size());
  for (unsigned n = 0; n < count; ++n)
    run("halves", {1}, {100}, array(std::vector<float>(x.begin() + 200 * n, x.begin() + 200 * n + 200)), out + 400 * n,
        pairs + 400 * n, back + 200 * n);
  const auto f16 = [](float v) { return std::isnan(v) ? 0x7FFFu : uint32_t{f32_to_f16(v)}; };
  const auto bf16 = [](float v) { return std::isnan(v) ? 0x7FFFu : uint32_t{f32_to_bf16(v)}; };
  const auto code = [](Format f, float v) { return std::isnan(v) ? 0x7Fu : static_cast<uint32_t>(encode(f, v)); };
  for (std::size_t i = 0; i < 100 * count; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    ASSERT_EQ(out[4 * i], f16(a)) << a;
    ASSERT_EQ(out[4 * i + 1], bf16(a)) << a;
    ASSERT_EQ(out[4 * i + 2], code(Format::e4m3, a) << 8 | code(Format::e4m3, b)) << a << ", " << b;
    ASSERT_EQ(out[4 * i + 3], code(Format::e5m2, a) << 8 | code(Format::e5m2, b)) << a << ", " << b;
    ASSERT_EQ(pairs[4 * i], bf16(a) << 16 | bf16(b));
    ASSERT_EQ(pairs[4 * i + 1], f16(a) << 16 | f16(b));
    // The float16 nearest to p p + p; in long double this is exact.
    const auto squared = [&](uint32_t half) {
      const long double p = f16_to_f32(static_cast<uint16_t>(half));
      const long double exact = p * p + p;
      float sum = static_cast<float>(exact);  // rounded to odd: the last bit tells that something was lost
      if (std::isfinite(sum) && sum != exact && !(std::bit_cast<uint32_t>(sum) & 1))
        sum = std::nextafter(sum, exact > sum ? INFINITY : -INFINITY);
      return f16(sum);
    };
    ASSERT_EQ(pairs[4 * i + 2], squared(pairs[4 * i + 1] >> 16) << 16 | squared(pairs[4 * i + 1] & 0xFFFF))
        << a << ", " << b;
    const auto value = [&](uint32_t c) { return f16(decode(Format::e4m3, static_cast<int>(c & 0xFF))); };
    ASSERT_EQ(pairs[4 * i + 3], value(out[4 * i + 2] >> 8u) << 16 | value(out[4 * i + 2]));
    const float from[] = {f16_to_f32(out[4 * i]), bf16_to_f32(out[4 * i + 1])};
    for (unsigned n = 0; n < 2; ++n)
      if (!std::isnan(from[n])) {
        ASSERT_EQ(back[2 * i + n], from[n]);
      }
  }
}

TEST(Orders, ASeedGivesAnotherOrderAndTheSameSeedTheSameOne) {
  const auto tickets = [](uint64_t seed) {
    emulator::HostMemory memory;
    auto* out = device_array(memory, std::vector<unsigned>(96));
    launch(kernel_of("features.ptx", "tickets"), {{3}, {32}, 0, seed}, memory,
           device_array(memory, std::vector<unsigned>(1)), out);
    return std::vector<unsigned>(out, out + 96);
  };
  std::vector<unsigned> ascending(96);
  std::iota(ascending.begin(), ascending.end(), 0u);
  EXPECT_EQ(tickets(0), ascending);
  EXPECT_NE(tickets(1), ascending);
  EXPECT_NE(tickets(2), tickets(1));
  EXPECT_EQ(tickets(1), tickets(1));
  std::vector<unsigned> sorted = tickets(3);
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, ascending);
}

}  // namespace
}  // namespace quire::testing
