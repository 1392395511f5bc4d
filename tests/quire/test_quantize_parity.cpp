// The kernels of the instruction set in use against the reference: every byte, over ragged sizes, specs, dtypes and
// inputs.
#include <thread>

#include "float_mode.h"
#include "inputs.h"
#include "quantized.h"
#include "quire/base/parallel.h"
#include "quire/operations/operations.h"
#include "specs.h"

namespace quire::testing {
namespace {

constexpr InputShape kShapes[] = {
    {1, 1},    {1, 33, 5},      {2, 15},         {15, 2, 1, 1}, {16, 16},   {17, 31, 0, 1},   {31, 17, 3, 3},
    {33, 129}, {127, 16, 1, 1}, {129, 33, 7, 2}, {64, 64},      {128, 128}, {130, 272, 0, 1}, {260, 47, 1},
};

std::string describe(const QuantSpec& spec, const Matrix& x, std::string_view what) {
  return text(spec.to_string(), " of ", name(x.dtype), " [", x.rows, ", ", x.cols, "], stride ", x.row_stride, ", ",
              what);
}

void expect_same(const Quantized& expected, const Quantized& actual) {
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    const size_t half = d == Direction::columnwise ? 3 : 0;
    ASSERT_EQ(difference(expected.side(d).amax, actual.side(d).amax), "") << kBufferNames[half + 2];
    ASSERT_EQ(difference(expected.side(d).scale, actual.side(d).scale), "") << kBufferNames[half + 1];
    ASSERT_EQ(difference(expected.side(d).data, actual.side(d).data), "") << kBufferNames[half];
  }
}

/// Both implementations on one problem; every buffer must agree.
void expect_parity(const QuantSpec& spec, const Matrix& x, const QuantizeOptions& options = {}) {
  expect_same(quantized(reference_runner(), spec, x, options), quantized(active_runner(), spec, x, options));
}

Randomness randomness(uint64_t seed) {
  Random r(seed);
  return {.seed = r.next(), .rowwise_offset = r.next(), .columnwise_offset = r.next()};
}

TEST(QuantizeParity, EverySpecAndSizeGivesTheBytesOfTheReference) {
  uint64_t turn = 0, specs = 0;
  for (const QuantSpec& spec : all_specs()) {
    ++specs;
    for (const InputShape& shape : kShapes)
      for (const DType dtype : kFloatTypes) {
        // The reference is slow: sizes above the smallest take one dtype per spec, and all in turn; so do the three
        // largest, of which a spec takes one.
        if (shape.rows * shape.cols > 1024 && dtype != kFloatTypes[turn % 3]) continue;
        if (shape.rows * shape.cols > 8192 && (specs + static_cast<uint64_t>(&shape - kShapes)) % 3 != 0) continue;
        // All kinds take turns; 8 kinds and 3 dtypes are coprime to each other, so every pair comes up.
        const Kind kind = static_cast<Kind>(++turn * 5 % kKindNames.size());
        const Input x(shape, dtype, kind, turn);
        SCOPED_TRACE(describe(spec, x, kKindNames[static_cast<size_t>(kind)]));
        expect_parity(spec, x, {.random = randomness(turn)});
        if (HasFatalFailure()) return;
      }
  }
}

TEST(QuantizeParity, EverySpecAndKindOfInputGivesTheBytesOfTheReference) {
  for (const QuantSpec& spec : all_specs())
    for (size_t kind = 0; kind < kKindNames.size(); ++kind)
      for (const DType dtype : kFloatTypes) {
        const Input x({36, 50, 1}, dtype, static_cast<Kind>(kind), 7 + kind);
        SCOPED_TRACE(describe(spec, x, kKindNames[kind]));
        expect_parity(spec, x, {.random = randomness(kind)});
        if (HasFatalFailure()) return;
      }
}

TEST(QuantizeParity, EmptyTensorsHaveTheScalesAndAmaxesOfTheReference) {
  for (const QuantSpec& spec : all_specs())
    for (const InputShape shape : {InputShape{0, 0}, InputShape{0, 40}, InputShape{40, 0}, InputShape{0, 1}}) {
      const Input x(shape, DType::bf16, Kind::normal, 1);
      SCOPED_TRACE(describe(spec, x, "empty"));
      expect_parity(spec, x);
      if (HasFatalFailure()) return;
    }
}

TEST(QuantizeParity, OneDirectionAloneGivesTheSameBytesAsBoth) {
  for (const QuantSpec& spec : all_specs())
    for (const bool columnwise : {false, true}) {
      const Input x({37, 70, 2}, DType::bf16, Kind::normal, 3);
      SCOPED_TRACE(describe(spec, x, columnwise ? "columnwise only" : "rowwise only"));
      expect_parity(spec, x, {.directions = {!columnwise, columnwise}, .random = randomness(3)});
      if (HasFatalFailure()) return;
    }
}

TEST(QuantizeParity, ARepeatedRowIsReadThroughStrideZero) {
  for (const QuantSpec& spec : all_specs()) {
    const Input row({1, 70}, DType::f32, Kind::special, 5);
    Matrix x = row;
    x.rows = 35;
    x.row_stride = 0;
    SCOPED_TRACE(describe(spec, x, "stride 0"));
    expect_parity(spec, x);
    if (HasFatalFailure()) return;
  }
}

TEST(QuantizeParity, GivenScalesGiveTheBytesOfTheReference) {
  for (const std::string spec : {"fp8_tensor", "fp8_tensor:e5m2", "fp8_tensor:pow2:eps=4"})
    for (const float scale : {1.0f, 143.36f, 0x1p-130f, 3e38f, 0.0f, std::numeric_limits<float>::infinity()})
      for (const DType dtype : kFloatTypes)
        for (const Kind kind : {Kind::normal, Kind::special, Kind::wide}) {
          const Input x({19, 61, 1}, dtype, kind, 11);
          SCOPED_TRACE(describe(QuantSpec::parse(spec), x, text("scale ", scale)));
          expect_parity(QuantSpec::parse(spec), x, {.scale = &scale});
          if (HasFatalFailure()) return;
        }
}

/// The first boundary of 64 bytes in memory.
uint8_t* aligned(Guarded& memory) {
  auto* at = memory.as<uint8_t>();
  return at + (-reinterpret_cast<uintptr_t>(at) & 63u);
}

/// A direction of a quantized tensor decodes as the reference decodes it; the memory between and behind output rows
/// stays as it was.
void expect_decodes(const Quantized& q, Direction d, DType dtype, int64_t padding) {
  const Operand o = q.operand(d);
  const int64_t stride = o.contraction + padding, count = o.outer * stride + 64 / size_of(dtype);
  Guarded expected(count * size_of(dtype) + 63), actual(count * size_of(dtype) + 63);
  DequantizeProblem p = q.decoding(d);
  p.out = {aligned(expected), dtype, o.outer, o.contraction, stride};
  reference::dequantize(p);
  p.out.data = aligned(actual);
  active_runner().run.dequantize(p);
  ASSERT_TRUE(actual.intact());
  for (int64_t i = 0; i < count; ++i) {
    const float e = load_element(aligned(expected), dtype, i), a = load_element(aligned(actual), dtype, i);
    ASSERT_EQ(float_difference(&e, &a, 1), "") << "element " << i;
  }
}

/// Any bytes.
void fill(QuantizedSide& side, Random& r) {
  for (Guarded* g : {&side.data, &side.scale, &side.amax})
    for (int64_t i = 0; i < g->size(); ++i) g->as<uint8_t>()[i] = static_cast<uint8_t>(r.next());
}

std::string describe(const QuantSpec& spec, const InputShape& shape, Direction d, DType dtype) {
  return text(spec.to_string(), d == Direction::rowwise ? " rowwise" : " columnwise", " [", shape.rows, ", ",
              shape.cols, "] to ", name(dtype));
}

TEST(QuantizeParity, EverySpecAndCodeDecodesAsTheReference) {
  uint64_t turn = 0;
  for (const QuantSpec& spec : all_specs())
    for (const InputShape& shape : kShapes)
      for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
        const DType dtype = kFloatTypes[turn % 3];
        SCOPED_TRACE(describe(spec, shape, d, dtype));
        Quantized q(spec, shape.rows, shape.cols);
        Random r(++turn);
        fill(q.side(d), r);
        expect_decodes(q, d, dtype, shape.padding);
        if (HasFatalFailure()) return;
      }
}

/// Any codes but NaN, and scales that are finite and positive: of about 2^power, or any fraction of it.
void fill_ordinary(const QuantSpec& spec, QuantizedSide& side, int power, Random& r) {
  fill(side, r);
  const FormatRow& f = row(spec.element);
  if (f.bits() == 8)
    for (int64_t i = 0; i < side.data.size(); ++i) {
      uint8_t& code = side.data.as<uint8_t>()[i];
      if ((code & 0x7F) > f.max_code()) code = static_cast<uint8_t>(code ^ 0x40);
    }
  const auto draw = [&] {
    return static_cast<float>(std::ldexp(1 + r.uniform(), power + static_cast<int>(r.below(4))));
  };
  const ScaleKind kind = spec.row().scale;
  for (int64_t i = 0; i < side.amax.size() / 4; ++i) side.amax.as<float>()[i] = 2688 * draw();
  for (int64_t i = 0; i < side.scale.size() / (kind == ScaleKind::f32 ? 4 : 1); ++i) {
    if (kind == ScaleKind::f32)
      side.scale.as<float>()[i] = draw();
    else
      side.scale.as<uint8_t>()[i] = static_cast<uint8_t>(
          kind == ScaleKind::e8m0 ? 127 + power + static_cast<int>(r.below(4)) : 1 + r.below(0x7E));
  }
}

TEST(QuantizeParity, CodesUnderOrdinaryScalesDecodeAsTheReference) {
  // Whole pieces of lines and ends of them; scales near 1, at either end of what products may take, and beyond.
  const InputShape shape{3, 2213, 0, 11};
  uint64_t turn = 0;
  for (const QuantSpec& spec : all_specs())
    for (const int power : {-2, -125, -102, 97, 115})
      for (const DType dtype : kFloatTypes) {
        const Direction d = ++turn % 5 == 0 ? Direction::columnwise : Direction::rowwise;
        SCOPED_TRACE(text(describe(spec, shape, d, dtype), ", scales of 2^", power));
        Quantized q(spec, shape.rows, shape.cols);
        Random r(turn);
        fill_ordinary(spec, q.side(d), power, r);
        expect_decodes(q, d, dtype, shape.padding);
        if (HasFatalFailure()) return;
      }
}

TEST(QuantizeParity, LargeResultsOfDecodingThatBypassCachesAreThoseOfTheReference) {
  // Rows on boundaries of 64 bytes, where values are streamed as they are made, and rows between them.
  for (const char* spec : {"fp8_tensor", "fp8_block", "mxfp8", "mxfp4", "nvfp4"})
    for (const DType dtype : kFloatTypes)
      for (const int64_t cols : {2048, 2113}) {
        Quantized q(QuantSpec::parse(spec), 1030, cols);
        Random r(static_cast<uint64_t>(cols));
        fill_ordinary(q.spec, q.side(Direction::rowwise), -2, r);
        SCOPED_TRACE(describe(q.spec, {q.rows, cols}, Direction::rowwise, dtype));
        expect_decodes(q, Direction::rowwise, dtype, 0);
        if (HasFatalFailure()) return;
      }
}

/// Cuts the range into pieces of `grain`, last first.
void run_backwards(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t step = std::max<int64_t>(grain, 1);
  for (int64_t begin = (count - 1) / step * step; begin >= 0; begin -= step) body(begin, std::min(begin + step, count));
}

/// One thread per piece.
void run_on_threads(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t step = std::max<int64_t>({grain, (count + 2) / 3, 1});
  std::vector<std::thread> threads;
  for (int64_t begin = 0; begin < count; begin += step)
    threads.emplace_back([&, begin] { body(begin, std::min(begin + step, count)); });
  for (std::thread& t : threads) t.join();
}

TEST(QuantizeParity, BytesDoNotDependOnHowWorkIsCut) {
  const Input x({259, 300, 1}, DType::bf16, Kind::normal, 17);
  for (const QuantSpec& spec : all_specs()) {
    const Quantized expected = quantized(active_runner(), spec, x, {.random = randomness(17)});
    for (const Executor& executor : {Executor(run_backwards), Executor(run_on_threads)}) {
      const Executor before = set_executor(executor);
      const Quantized actual = quantized(active_runner(), spec, x, {.random = randomness(17)});
      set_executor(before);
      SCOPED_TRACE(describe(spec, x, "cut"));
      expect_same(expected, actual);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(QuantizeParity, FlushToZeroOfTheCallingThreadOrOfThePoolsChangesNothingAndIsKept) {
  const uint64_t before = float_mode();
  const Executor flushing = [](int64_t count, int64_t, const auto& body) {
    set_float_mode(float_mode() | kFlush);
    body(0, count);
    EXPECT_EQ(float_mode() & kFlush, kFlush);
    set_float_mode(float_mode() & ~kFlush);
  };
  for (const QuantSpec& spec : all_specs()) {
    const Input x({20, 40}, DType::f32, Kind::wide, 23);
    SCOPED_TRACE(describe(spec, x, "flush to zero"));
    const Quantized expected = quantized(reference_runner(), spec, x);
    set_float_mode(before | kFlush);
    const Quantized by_caller = quantized(active_runner(), spec, x);
    EXPECT_EQ(float_mode() & kFlush, kFlush);
    set_float_mode(before);
    expect_same(expected, by_caller);
    const Executor serial = set_executor(flushing);
    const Quantized by_pool = quantized(active_runner(), spec, x);
    set_executor(serial);
    expect_same(expected, by_pool);
  }
}

}  // namespace
}  // namespace quire::testing
