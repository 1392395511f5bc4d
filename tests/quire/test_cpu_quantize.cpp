// Every instruction set of this machine, or the one that QUIRE_ISA names: the bytes of the reference on sizes that span
// tiles, however the work is cut.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>

#include "float_mode.h"
#include "inputs.h"
#include "quantized.h"
#include "quire/base/env.h"
#include "quire/base/parallel.h"
#include "quire/cpu/isa.h"
#include "quire/format/codec.h"
#include "quire/format/half.h"
#include "specs.h"

namespace quire::testing {
namespace {

/// Those of this machine, or of the instruction set that QUIRE_ISA names.
std::vector<Runner> runners() {
  std::vector<Runner> found;
  for (const cpu::Isa& isa : cpu::all())
    if (isa.supported() && (env::isa().empty() || env::isa() == isa.name))
      found.push_back({std::string(isa.name), *isa.kernels});
  return found;
}

class CpuQuantize : public ::testing::TestWithParam<Runner> {};
INSTANTIATE_TEST_SUITE_P(All, CpuQuantize, ::testing::ValuesIn(runners()), runner_name);

/// More than one tile of 128 in each dimension, ragged and whole.
constexpr InputShape kShapes[] = {{257, 140, 3, 1}, {130, 385}, {256, 256}};

constexpr Randomness kRandom{.seed = 0x9E3779B97F4A7C15u, .rowwise_offset = 6, .columnwise_offset = 7};

void expect_same_bytes(const Quantized& expected, const Quantized& actual) {
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    const std::string_view direction = d == Direction::rowwise ? "rowwise" : "columnwise";
    ASSERT_EQ(difference(expected.side(d).amax, actual.side(d).amax), "") << direction << " amax";
    ASSERT_EQ(difference(expected.side(d).scale, actual.side(d).scale), "") << direction << " scale";
    ASSERT_EQ(difference(expected.side(d).data, actual.side(d).data), "") << direction << " data";
  }
}

TEST_P(CpuQuantize, GivesTheBytesOfTheReferenceAcrossTiles) {
  size_t turn = 0;
  for (const QuantSpec& spec : plain_specs()) {
    ++turn;
    const DType dtype = kFloatTypes[turn % kFloatTypes.size()];
    const Input x(kShapes[turn % std::size(kShapes)], dtype, turn % 2 ? Kind::special : Kind::normal, turn);
    SCOPED_TRACE(spec.to_string());
    const Quantized expected = quantized(reference_runner(), spec, x, {.random = kRandom});
    expect_same_bytes(expected, quantized(GetParam(), spec, x, {.random = kRandom}));
    if (HasFatalFailure()) return;
  }
}

/// Lines longer than the piece that is quantized at once, whole and with an end of their own; a NaN in one piece only.
TEST_P(CpuQuantize, GivesTheBytesOfTheReferenceOnLongLines) {
  size_t turn = 0;
  for (const QuantSpec& spec : plain_specs())
    for (const InputShape shape : {InputShape{3, 1300, 1, 1}, InputShape{17, 2048}}) {
      const DType dtype = kFloatTypes[++turn % kFloatTypes.size()];  // 2 shapes and 3 dtypes are coprime
      const Input x(shape, dtype, Kind::outliers, 31);
      const auto* last = static_cast<const char*>(Matrix(x).data) + (2 * x.stride() + 1100) * size_of(dtype);
      store_element(const_cast<char*>(last), dtype, 0, -std::numeric_limits<float>::quiet_NaN());
      SCOPED_TRACE(text(spec.to_string(), " of ", name(dtype), " [", shape.rows, ", ", shape.cols, "]"));
      const Quantized expected = quantized(reference_runner(), spec, x, {.random = kRandom});
      expect_same_bytes(expected, quantized(GetParam(), spec, x, {.random = kRandom}));
      if (HasFatalFailure()) return;
    }
}

/// All finite bfloat16 numbers in the order of their bits, so that lines hold numbers of one sign and of few exponents.
std::vector<uint16_t> finite_words() {
  std::vector<uint16_t> words;
  for (uint32_t w = 0; w < 65536; ++w)
    if ((w & 0x7F80u) != 0x7F80u) words.push_back(static_cast<uint16_t>(w));
  return words;
}

TEST_P(CpuQuantize, EveryBfloat16NumberHasItsCodeUnderAnyMultiplier) {
  const std::vector<uint16_t> words = finite_words();
  constexpr int64_t kCols = 1020;
  const Matrix x{words.data(), DType::bf16, std::ssize(words) / kCols, kCols, kCols};
  for (const std::string_view text : {"fp8_tensor", "fp8_tensor:e5m2"})
    for (const float fraction : {1.0f, 1.37f})
      for (int exponent = -127; exponent < 128; exponent += 3) {
        const float multiplier = std::ldexp(fraction, exponent);
        const QuantSpec spec = QuantSpec::parse(text);
        const Quantized q = quantized(GetParam(), spec, x, {.directions = {true, false}, .scale = &multiplier});
        const uint8_t* codes = q.side(Direction::rowwise).data.as<uint8_t>();
        for (size_t i = 0; i < words.size(); ++i) {
          const volatile float product = bf16_to_f32(words[i]) * multiplier;
          ASSERT_EQ(int{codes[i]}, encode(spec.element, product)) << words[i] << " times " << multiplier;
        }
      }
}

/// Every byte of a part's direction is where the whole has it: a part is rows [first, first + part.rows).
void expect_part(const Quantized& whole, const Quantized& part, int64_t first, Direction d) {
  const bool transposed = d == Direction::columnwise && whole.spec.row().transposed;
  const int64_t per_byte = transposed && whole.spec.packed() ? 2 : 1;
  const Guarded &all = whole.side(d).data, &few = part.side(d).data;
  if (!transposed) {
    const int64_t at = first * (all.size() / whole.rows);
    ASSERT_EQ(difference(all.as<uint8_t>() + at, few.data(), few.size()), "");
    return;
  }
  const int64_t each = few.size() / part.cols, stride = all.size() / whole.cols;
  for (int64_t c = 0; c < part.cols; ++c)
    ASSERT_EQ(difference(all.as<uint8_t>() + c * stride + first / per_byte, few.as<uint8_t>() + c * each, each), "");
}

/// Results so large that caches are bypassed have the bytes of their parts, at addresses that are and are not those of
/// cache lines.
TEST_P(CpuQuantize, TensorsLargerThanCachesHaveTheBytesOfTheirParts) {
  constexpr int64_t kPart = 256;
  const float scale = 100;
  for (const std::string_view text : {"fp8_tensor:e5m2", "mxfp8", "mxfp4"}) {
    const QuantSpec spec = QuantSpec::parse(text);
    const Input x({spec.packed() ? 2049 : 1025, 4100}, DType::bf16, Kind::normal, 37);
    const QuantizeOptions options{.scale = spec.row().has_amax ? &scale : nullptr};
    const Quantized whole = quantized(GetParam(), spec, x, options);
    SCOPED_TRACE(text);
    for (int64_t first = 0; first < Matrix(x).rows; first += kPart) {
      Matrix rows = x;
      rows.data = static_cast<const char*>(rows.data) + first * rows.row_stride * size_of(rows.dtype);
      rows.rows = std::min(kPart, rows.rows - first);
      const Quantized part = quantized(GetParam(), spec, rows, options);
      expect_part(whole, part, first, Direction::rowwise);
      expect_part(whole, part, first, Direction::columnwise);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CpuQuantize, DecodesAsTheReferenceAcrossTiles) {
  size_t turn = 0;
  for (const QuantSpec& spec : plain_specs())
    for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
      ++turn;
      const Input x(kShapes[turn % std::size(kShapes)], DType::bf16, Kind::normal, turn);
      const Quantized q = quantized(GetParam(), spec, x, {.random = kRandom});
      const std::vector<float> expected = dequantized(reference_runner(), q, d), actual = dequantized(GetParam(), q, d);
      ASSERT_EQ(float_difference(expected.data(), actual.data(), std::ssize(expected)), "") << spec.to_string();
    }
}

TEST_P(CpuQuantize, FlushToZeroOfTheCallingThreadDoesNotReachScales) {
  // Subnormal amaxes, and reciprocals that are subnormal: flushed, they would give other scales.
  for (const float magnitude : {0x1p-140f, 0x1.FCp127f}) {
    const std::vector<float> values(20 * 40, magnitude);
    const Matrix x{values.data(), DType::f32, 20, 40, 40};
    for (const QuantSpec& spec : plain_specs()) {
      const Quantized expected = quantized(reference_runner(), spec, x, {.random = kRandom});
      const uint64_t before = float_mode();
      set_float_mode(before | kFlush);
      const Quantized actual = quantized(GetParam(), spec, x, {.random = kRandom});
      set_float_mode(before);
      SCOPED_TRACE(text(spec.to_string(), " of ", magnitude));
      expect_same_bytes(expected, actual);
      if (HasFatalFailure()) return;
    }
  }
}

/// Pieces of 1, 2, 3, ... tasks in an order of their own.
void run_shuffled(int64_t count, int64_t /*grain*/, const std::function<void(int64_t, int64_t)>& body) {
  std::vector<int64_t> ends{0};
  for (int64_t size = 1; ends.back() < count; ++size) ends.push_back(std::min(count, ends.back() + size));
  std::vector<size_t> order(ends.size() - 1);
  std::iota(order.begin(), order.end(), size_t{0});
  Random r(static_cast<uint64_t>(count));
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[r.below(i)]);
  for (const size_t i : order) body(ends[i], ends[i + 1]);
}

/// Three threads that take single tasks as they come.
void run_on_threads(int64_t count, int64_t /*grain*/, const std::function<void(int64_t, int64_t)>& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) body(i, i + 1);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

TEST_P(CpuQuantize, OneTokenIsNotWorthASecondThread) {
  // A real executor cuts a range only into pieces of at least the grain.
  bool cut = false;
  const Executor before = set_executor([&](int64_t count, int64_t grain, const auto& body) {
    cut = cut || count >= 2 * grain;
    body(0, count);
  });
  const Input x({1, 4096}, DType::bf16, Kind::normal, 3);
  std::string which;
  for (const QuantSpec& spec : plain_specs()) {
    quantized(GetParam(), spec, x, {.directions = {true, false}, .random = kRandom});
    if (cut) which = spec.to_string();
    if (cut) break;
  }
  set_executor(before);
  EXPECT_EQ(which, "");
}

TEST_P(CpuQuantize, BytesDoNotDependOnHowTheWorkIsCut) {
  for (const QuantSpec& spec : plain_specs()) {
    const Input x({257, 140, 3, 1}, DType::bf16, Kind::outliers, 5);
    SCOPED_TRACE(spec.to_string());
    const Quantized whole = quantized(GetParam(), spec, x, {.random = kRandom});
    for (const auto& executor : {run_shuffled, run_on_threads}) {
      const Executor before = set_executor(executor);
      const Quantized cut = quantized(GetParam(), spec, x, {.random = kRandom});
      const std::vector<float> decoded = dequantized(GetParam(), cut, Direction::columnwise);
      set_executor(before);
      expect_same_bytes(whole, cut);
      const std::vector<float> expected = dequantized(GetParam(), whole, Direction::columnwise);
      EXPECT_EQ(float_difference(expected.data(), decoded.data(), std::ssize(expected)), "");
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace quire::testing
