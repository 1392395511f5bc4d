// Values that break a rule: the record that a device's kernels write becomes the host's error, once; and what a context
// says of its device.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "quire/base/fault.h"
#include "quire/device/device.h"
#include "quire/device/dispatch.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

std::string raised(FaultRecord& record) {
  try {
    raise_reported(record);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Fault, OfAKernelOnTheHostIsAnErrorThatADeviceCanReportWithTheSameText) {
  const std::vector<int32_t> ids{0, 1, 7};
  std::vector<int32_t> kept(3);
  FaultRecord record;
  std::string text;
  try {
    limit_capacity({.ids = ids.data(), .count = 3, .num_experts = 4, .capacity = 1, .kept = kept.data()});
  } catch (const FaultError& e) {
    text = e.what();
    EXPECT_EQ(e.rule, ValueRule::expert_id);
    report(record, e.operation, e.rule, e.fault);
  }
  EXPECT_EQ(text, "limit_capacity: topk_ids must be numbers of experts, from 0 to 3, or -1 for none; got 7 at place 2");
  EXPECT_EQ(raised(record), text);
}

TEST(Fault, IsRaisedOnceAndLeavesTheRecordFree) {
  FaultRecord record;
  EXPECT_EQ(raised(record), "");
  report(record, "first", ValueRule::chunk_order, {.limit = 3});
  report(record, "second", ValueRule::chunk_order, {.limit = 4});
  EXPECT_EQ(raised(record), "first: order must hold each of the numbers from 0 to 2 once");
  EXPECT_EQ(raised(record), "");
  report(record, "third", ValueRule::given_amax, {.number = -0.5});
  EXPECT_EQ(raised(record), "third: a given amax must not be negative or NaN; got -0.5; calibrate it, or leave it out");
}

TEST(Fault, OfAnOperationWithALongNameLosesTheEndOfTheName) {
  FaultRecord record;
  report(record, std::string(500, 'x'), ValueRule::stale_codes, {});
  const std::string text = raised(record);
  EXPECT_EQ(text.find(": the weight has changed"), FaultRecord::kOperation - 1);
}

TEST(Fault, EveryRuleHasATextWhoseNumbersAreAllKnown) {
  const Fault numbers{.index = 1001, .value = 1002, .number = 1003.5, .limit = 1004, .more = {1005, 1006, 1007}};
  for (const RuleText& row : rule_texts()) {
    const std::string text = describe("op", row.rule, numbers);
    EXPECT_EQ(text.find_first_of("{}"), text.npos) << row.name;
    EXPECT_EQ(text.find("op"), 0) << row.name;
    EXPECT_EQ(describe("op", row.rule, {}) == text, row.text.find('{') == row.text.npos) << row.name;
  }
}

/// Writers elect one, and readers too: no record is torn, lost or raised twice.
TEST(Fault, OfManyThreadsIsWholeAndToldToOneReader) {
  FaultRecord record;
  std::atomic<int64_t> told{0}, torn{0}, running{4};
  const auto writer = [&](int64_t number) {
    for (int i = 0; i < 5000; ++i)
      report(record, std::to_string(number), ValueRule::row_once,
             {.index = number, .value = number, .more = {number, number, number}});
    --running;
  };
  const auto reader = [&] {
    while (running > 0 || std::atomic_ref(record.own_claim).load() != std::atomic_ref(record.heard).load()) {
      try {
        raise_reported(record);
        std::this_thread::yield();
      } catch (const FaultError& e) {
        ++told;
        const int64_t n = e.fault.index;
        torn += e.operation != std::to_string(n) || e.fault.value != n || e.fault.more[2] != n;
      }
    }
  };
  std::vector<std::thread> threads;
  for (int64_t n = 0; n < 4; ++n) threads.emplace_back(writer, 1000 + n);
  for (int n = 0; n < 2; ++n) threads.emplace_back(reader);
  for (std::thread& one : threads) one.join();
  EXPECT_GT(told, 0);
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(raised(record), "");
}

class Lender final : public Workspace {
 public:
  void* allocate(int64_t bytes) override { return lent.emplace_back(static_cast<size_t>(bytes)).data(); }
  std::vector<std::vector<char>> lent;
};

/// Keeps the problem of the last event.
class Reader final : public Observer {
 public:
  bool reads_values() const override { return true; }
  void ran(const AnyProblem& problem, const Context&) override {
    if (const auto* const* p = std::get_if<const ActivationProblem*>(&problem)) y = (*p)->out.y;
  }
  MutableMatrix y{};
};

void no_activation(const ActivationProblem&, const Context&) {}
constexpr std::array<KernelRow<ActivationProblem>, 1> kNoActivation{{{"none", nullptr, no_activation}}};

TEST(Producer, OfADeviceWithItsDefaultStreamGetsMemoryOfTheWorkspaceForAnObserver) {
  Device device{.name = "lazy", .kernels = {}};
  std::get<KernelRows<ActivationProblem>>(device.kernels) = kNoActivation;
  std::vector<float> x(64, 1.0f);
  std::vector<uint8_t> codes(64), scales(2);
  Lender lender;
  Reader reader;
  ActivationProblem p{.activation = Activation::parse("gelu"),
                      .x = {x.data(), DType::f32, 2, 32, 32},
                      .out = {.y = {nullptr, DType::f32, 2, 32, 32},
                              .spec = QuantSpec::parse("mxfp8"),
                              .rowwise = {codes.data(), scales.data(), nullptr}}};
  Context context{.device = &device, .workspace = &lender, .observer = &reader};
  EXPECT_FALSE(on_host(context));
  produce(p, context);
  ASSERT_EQ(lender.lent.size(), 1u);
  EXPECT_EQ(reader.y.data, lender.lent[0].data());
  EXPECT_EQ(lender.lent[0].size(), 2 * 32 * sizeof(float));
  // A device whose memory nobody lends gives the values to nobody.
  context.workspace = nullptr;
  produce(p, context);
  EXPECT_EQ(reader.y.data, nullptr);
  // The host's kernels may use the heap.
  produce(p, {.observer = &reader});
  EXPECT_NE(reader.y.data, nullptr);
  EXPECT_TRUE(on_host({}));
  EXPECT_TRUE(on_host(host()));
}

}  // namespace
}  // namespace quire::testing
