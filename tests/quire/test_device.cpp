// Devices and contexts: a kind of device that is registered gets the problems of its contexts and no others, and what a
// context brings (executor, workspace, observer) is what its kernels use.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "quire/base/parallel.h"
#include "quire/device/dispatch.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

/// A device of this test: it knows how to advance a counter, by 100.
void advance_by_100(const AdvanceProblem& p, const Context& context) {
  *p.value += 100;
  *static_cast<int*>(context.stream) += context.index;
}
constexpr std::array<KernelRow<AdvanceProblem>, 1> kAdvance{{{"by_100", nullptr, advance_by_100}}};

const Device& toy_device() {
  static const Device device = [] {
    Device d{.name = "toy", .kernels = {}};
    std::get<KernelRows<AdvanceProblem>>(d.kernels) = kAdvance;
    return d;
  }();
  [[maybe_unused]] static const bool registered = (register_device(device), true);
  return device;
}

TEST(Device, GetsTheProblemsOfItsContextsAndTheHostTheOthers) {
  int stream = 0;
  const Context context{.device = &toy_device(), .index = 7, .stream = &stream};
  int64_t value = 0;
  advance({.value = &value}, context);
  EXPECT_EQ(value, 100);
  EXPECT_EQ(stream, 7);
  advance({.value = &value});
  EXPECT_EQ(value, 101);
}

TEST(Device, IsFoundByItsName) {
  EXPECT_EQ(find_device("toy"), &toy_device());
  EXPECT_EQ(find_device("cpu"), host().device);
  EXPECT_EQ(find_device("nothing"), nullptr);
  EXPECT_THROW(register_device(toy_device()), Error);
  static const Device second{.name = "cpu", .kernels = {}};
  EXPECT_THROW(register_device(second), Error);
}

TEST(Device, WithoutAKernelForAProblemSaysSoAndLeavesItToNobodyElse) {
  float to = 1, from = 2;
  try {
    maximum({.to = &to, .values = &from, .count = 1}, {.device = &toy_device()});
    FAIL() << "a kernel of another device ran";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()),
              "maximum: this device has no kernels for it; move the tensors to one that has, such as the CPU");
  }
  EXPECT_EQ(to, 1);
}

TEST(Device, ARefusedProblemReachesNoKernel) {
  EXPECT_THROW(advance({.value = nullptr}, {.device = &toy_device()}), Error);
}

TEST(Context, BringsTheExecutorOfItsKernelsAlsoWhereTheyCallEachOther) {
  std::vector<float> x(1 << 16, 1.0f);
  int64_t chunks = 0, of_process = 0;
  const auto run_all = [](int64_t& count) {
    return [&count](int64_t n, int64_t, FunctionRef<void(int64_t, int64_t)> body) { ++count, body(0, n); };
  };
  const Executor own(run_all(chunks), [] { return int64_t{3}; });
  const Executor before = set_executor(run_all(of_process));
  int64_t found = 0;
  fingerprint({.x = {x.data(), DType::f32, 256, 256, 256}, .to = &found}, {.executor = &own});
  EXPECT_EQ(chunks, 1);
  EXPECT_EQ(of_process, 0);
  {
    const ExecutorScope scope(&own);
    EXPECT_EQ(parallelism(), 3);
    parallel_for(2, 1, [&](int64_t, int64_t) { parallel_for(2, 1, [](int64_t, int64_t) {}); });
  }
  EXPECT_EQ(chunks, 3);
  EXPECT_EQ(of_process, 0);
  fingerprint({.x = {x.data(), DType::f32, 256, 256, 256}, .to = &found});
  EXPECT_EQ(of_process, 1);
  set_executor(before);
}

class CountingWorkspace final : public Workspace {
 public:
  void* allocate(int64_t bytes) override {
    asked += bytes;
    return memory.data();
  }
  int64_t asked = 0;
  std::vector<int64_t> memory = std::vector<int64_t>(64);
};

TEST(Context, BringsTheMemoryThatKernelsWorkIn) {
  const std::array<float, 4> from{1, 2, 3, 4};
  std::array<float, 100> to{};  // of more rows than a kernel has memory of its own for
  const std::array<int32_t, 2> rows{2, 0};
  CountingWorkspace workspace;
  permute({.from = {from.data(), DType::f32, 2, 2, 2},
           .map = {.rows = rows.data(), .tokens = 2, .slots = 1},
           .to = {to.data(), DType::f32, 50, 2, 2}},
          {.workspace = &workspace});
  EXPECT_EQ(workspace.asked, int64_t{50 * sizeof(int64_t)});
  EXPECT_EQ(to, (std::array<float, 100>{3, 4, 0, 0, 1, 2}));
}

class Log final : public Observer {
 public:
  bool reads_values() const override { return false; }
  void ran(const AnyProblem& problem, const Context& context) override {
    std::visit([&](const auto* p) { text += quire::text(context.part, ": ", to_string(*p), "\n"); }, problem);
  }
  std::string text;
};

TEST(Context, BringsTheObserverThatHearsOfEveryProblemThatRan) {
  Log log;
  int64_t value = 0, found = 0;
  const float x = 1;
  advance({.value = &value}, {.observer = &log, .part = "a"});
  fingerprint({.x = {&x, DType::f32, 1, 1, 1}, .to = &found}, {.observer = &log, .part = "b"});
  EXPECT_THROW(advance({.value = nullptr}, {.observer = &log, .part = "c"}), Error);
  EXPECT_EQ(log.text, "a: advance of a counter\nb: fingerprint of float32 [1, 1]\n");
}

TEST(Devices, ThatLieInALibraryApartAreFoundOrSayWhatIsMissing) {
  EXPECT_EQ(absence_of("cpu"), "");
  EXPECT_EQ(absence_of("tpu"), "there is no such kind of device");
  EXPECT_EQ(find_device("tpu"), nullptr);
  const Device* const cuda = find_device("cuda");
  EXPECT_EQ(cuda == nullptr, !absence_of("cuda").empty()) << absence_of("cuda");
  EXPECT_TRUE(!cuda || cuda->name == "cuda");
}

TEST(Randomness, OfAModuleIsReadByTheKernelFromWhereItsCounterIs) {
  const QuantSpec spec = QuantSpec::parse("nvfp4:sr");
  std::vector<float> x(32 * 32);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 37) * 0.3f;
  const auto codes = [&](const Randomness& random) {
    std::vector<uint8_t> data(32 * 16), scale(32 * 2);
    float amax = 0;
    quantize({.spec = spec,
              .x = {x.data(), DType::f32, 32, 32, 32},
              .rowwise = {data.data(), scale.data(), &amax},
              .columnwise = {},
              .random = random});
    return data;
  };
  const std::array<int64_t, 2> state{11, 5};
  EXPECT_EQ(codes({.columnwise_offset = 1, .state = state.data()}),
            codes({.seed = 11, .rowwise_offset = 10, .columnwise_offset = 11}));
  EXPECT_EQ(codes({.seed = 2, .state = state.data()}), codes({.seed = 13, .rowwise_offset = 10}));
  EXPECT_NE(codes({.seed = 2, .state = state.data()}), codes({.seed = 11, .rowwise_offset = 10}));
}

}  // namespace
}  // namespace quire::testing
