// The registry of runners: numbers, names, lifetimes, errors, and threads that meet in it.
#include "quire/runner/registry.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "quire/base/check.h"

namespace quire::testing {
namespace {

/// Does what a test wants to be done.
class Scripted final : public quire::Runner {
 public:
  explicit Scripted(RunnerInfo info, std::function<void(const RunnerCall&)> script = {})
      : Runner(std::move(info)), script_(std::move(script)) {}
  ~Scripted() override { ++ended; }
  void run(const RunnerCall& call) override {
    if (script_) script_(call);
  }

  static std::atomic<int> ended;

 private:
  std::function<void(const RunnerCall&)> script_;
};
std::atomic<int> Scripted::ended{0};

const RunnerInfo kLinear{.in_features = 4, .out_features = 2};
const RunnerInfo kMoe{.kind = RunnerKind::moe, .in_features = 4, .out_features = 4, .experts = 3};

/// Registered for as long as it lives.
struct Registered {
  explicit Registered(RunnerInfo info, std::string_view name = {},
                      const std::function<void(const RunnerCall&)>& script = {})
      : handle(register_runner(std::make_shared<Scripted>(std::move(info), script), name)) {}
  ~Registered() {
    if (registered_runner(handle)) unregister_runner(handle);
  }
  const int64_t handle;
};

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

/// A call of T = 2 that fits kLinear or kMoe; its memory is never read.
RunnerRequest request(RunnerKind kind = RunnerKind::linear) {
  static const float memory[32] = {};
  static const int32_t ids[4] = {0, 2, -1, 1};
  static float out[32];
  RunnerRequest r{.op = "the_op", .kind = kind, .call = {}};
  const int64_t n = kind == RunnerKind::moe ? 4 : 2;
  r.call.x = {memory, DType::f32, 2, 4, 4};
  r.call.out = {out, DType::f32, 2, n, n};
  if (kind == RunnerKind::moe) r.call.expert_ids = ids, r.call.expert_weights = memory, r.call.top_k = 2;
  return r;
}

TEST(RunnerRegistry, HandlesCountUpAndAreNeverGivenAgain) {
  std::set<int64_t> seen;
  for (int i = 0; i < 5; ++i) {
    const Registered r(kLinear);
    EXPECT_GT(r.handle, 0);
    EXPECT_TRUE(seen.insert(r.handle).second) << r.handle << " was given twice";
  }
}

TEST(RunnerRegistry, ANameLeadsToItsRunnerUntilThatIsUnregistered) {
  const auto by_name = [] { return find_runner("the_op", std::string_view("up"))->handle; };
  {
    const Registered first(kLinear, "up"), unnamed(kLinear), also_unnamed(kLinear);
    EXPECT_EQ(by_name(), first.handle);
    EXPECT_EQ(error_of([] { register_runner(std::make_shared<Scripted>(kLinear), "up"); }),
              text("register_runner: the name 'up' belongs to runner ", first.handle,
                   "; unregister that one first, or choose another name"));
  }
  EXPECT_EQ(error_of(by_name),
            "the_op: no runner has the name 'up'; none is registered in this process; register one under that name in "
            "this process and keep it registered while it is used");
  const Registered second(kLinear, "up");
  EXPECT_EQ(by_name(), second.handle);
}

TEST(RunnerRegistry, AStaleHandleIsToldFromOneThatNeverWasAndWhatIsRegisteredIsListed) {
  int64_t stale;
  {
    const Registered gone(kLinear);
    stale = gone.handle;
  }
  const Registered a(kLinear, "a"), b(kMoe);
  const std::string listed = text("registered: ", a.handle, " 'a' (linear, cpu), ", b.handle, " (moe, cpu)");
  EXPECT_EQ(error_of([&] { find_runner("the_op", stale); }),
            text("the_op: no runner has the handle ", stale, " any more, it was unregistered; ", listed,
                 "; register one in this process and keep it registered while it is used"));
  for (const int64_t never : {b.handle + 1, int64_t{0}, int64_t{-1}})
    EXPECT_EQ(error_of([&] { find_runner("the_op", never); }),
              text("the_op: no runner has the handle ", never, "; ", listed,
                   "; register one in this process and keep it registered while it is used"));
  EXPECT_NE(error_of([&] { unregister_runner(stale); }).find(listed), std::string::npos);
}

TEST(RunnerRegistry, ALongListIsCut) {
  std::vector<std::unique_ptr<Registered>> many;
  for (int i = 0; i < 11; ++i) many.push_back(std::make_unique<Registered>(kLinear));
  EXPECT_NE(error_of([] { find_runner("the_op", int64_t{0}); }).find(" and 3 more"), std::string::npos);
}

TEST(RunnerRegistry, WhatIsNoRunnerIsNotRegistered) {
  const size_t before = registered_runners().size();
  const auto refused = [](RunnerInfo info, std::string_view name = {}) {
    return error_of([&] { register_runner(std::make_shared<Scripted>(std::move(info)), name); });
  };
  EXPECT_EQ(error_of([] { register_runner(nullptr); }), "register_runner: got a null pointer; pass a runner");
  EXPECT_NE(refused({}).find("must be at least 1; got 0, 0 and 0"), std::string::npos);
  RunnerInfo none = kMoe;
  none.experts = 0;
  EXPECT_NE(refused(none).find("experts (of a moe) must be at least 1"), std::string::npos);
  RunnerInfo nowhere = kLinear;
  nowhere.device = "";
  EXPECT_NE(refused(nowhere).find("names no device"), std::string::npos);
  EXPECT_NE(refused(kLinear, "a\tb").find("has control characters"), std::string::npos);
  EXPECT_EQ(registered_runners().size(), before);
}

TEST(RunnerRegistry, ARequestThatDoesNotFitIsRefusedBeforeTheRunnerSeesIt) {
  int calls = 0;
  const auto count = [&](const RunnerCall&) { ++calls; };
  RunnerInfo elsewhere = kLinear;
  elsewhere.device = "cuda:0";
  const Registered linear(kLinear, "up", count), moe(kMoe, "", count), foreign(elsewhere, "", count);
  const auto said = [](int64_t handle, const RunnerRequest& r) {
    return error_of([&] { run(*find_runner("the_op", handle), r); });
  };
  const RunnerRequest plain = request(), mixture = request(RunnerKind::moe);

  const std::string listed = text("; registered: ", linear.handle, " 'up' (linear, cpu), ", moe.handle, " (moe, cpu), ",
                                  foreign.handle, " (linear, cuda:0); ");
  EXPECT_EQ(said(moe.handle, plain),
            text("the_op: runner ", moe.handle, " is of kind moe, and this operator needs linear", listed,
                 "pass one of that kind"));
  EXPECT_EQ(said(foreign.handle, plain),
            text("the_op: runner ", foreign.handle, " computes on cuda:0 and x lies on cpu", listed,
                 "move x, or register a runner for cpu"));
  RunnerRequest r = plain;
  r.call.x.cols = 5;
  EXPECT_EQ(said(linear.handle, r),
            text("the_op: runner ", linear.handle, " 'up' takes 4 features and gives 2; got x with 5 and a result of 2",
                 listed, "pass what fits it, or another runner"));
  r = plain;
  r.call.out.cols = 3;
  EXPECT_NE(said(linear.handle, r).find("a result of 3"), std::string::npos);
  for (const int64_t top_k : {0, 4}) {
    r = mixture;
    r.call.top_k = top_k;
    EXPECT_EQ(said(moe.handle, r),
              text("the_op: runner ", moe.handle, " has 3 experts, of which a token chooses 1 to 3; got ", top_k,
                   " choices per token"));
  }
  for (const int32_t id : {-2, 3}) {
    const int32_t ids[4] = {0, 2, -1, id};
    r = mixture;
    r.call.expert_ids = ids;
    EXPECT_EQ(said(moe.handle, r),
              text("the_op: topk_ids must be in [0, 3), or -1 for no expert; got ", id, " for token 1, choice 1"));
  }
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(said(linear.handle, plain), "no error");
  EXPECT_EQ(said(moe.handle, mixture), "no error");
  EXPECT_EQ(calls, 2);
  r = plain;
  r.call.x.rows = r.call.out.rows = 0;
  EXPECT_EQ(said(linear.handle, r), "no error");
  EXPECT_EQ(calls, 2) << "a runner was asked about no tokens";
}

TEST(RunnerRegistry, ARunnerThatIsUnregisteredWhileItRunsEndsItsCallFirst) {
  Scripted::ended = 0;
  std::promise<void> inside, leave;
  int ended_inside = -1;
  const Registered r(kLinear, "", [&](const RunnerCall&) {
    inside.set_value();
    leave.get_future().wait();
    ended_inside = Scripted::ended;
  });
  std::thread caller([&] { run(*find_runner("the_op", r.handle), request()); });
  inside.get_future().wait();
  unregister_runner(r.handle);
  EXPECT_EQ(registered_runner(r.handle), nullptr);
  leave.set_value();
  caller.join();
  EXPECT_EQ(ended_inside, 0) << "the runner was destroyed while it ran";
  EXPECT_EQ(Scripted::ended, 1);
}

TEST(RunnerRegistry, ARunnerMayUseTheRegistryWhenItEnds) {
  struct Nested final : quire::Runner {
    Nested() : Runner(kLinear), inner(register_runner(std::make_shared<Scripted>(kLinear))) {}
    ~Nested() override { unregister_runner(inner); }
    void run(const RunnerCall&) override {}
    int64_t inner;
  };
  const size_t before = registered_runners().size();
  unregister_runner(register_runner(std::make_shared<Nested>()));
  EXPECT_EQ(registered_runners().size(), before);
}

TEST(RunnerRegistry, WhatARunnerThrowsReachesTheCaller) {
  const Registered r(kLinear, "", [](const RunnerCall&) { throw std::out_of_range("its own words"); });
  EXPECT_THROW(run(*find_runner("the_op", r.handle), request()), std::out_of_range);
}

TEST(RunnerRegistry, ThreadsRegisterCallAndUnregisterAtTheSameTime) {
  constexpr int kThreads = 4, kRounds = 300;
  std::atomic<int> calls{0}, stale{0};
  std::atomic<int64_t> last{0};
  const auto work = [&](int thread) {
    for (int i = 0; i < kRounds; ++i) {
      const std::string name = text("thread ", thread);
      const Registered r(kLinear, name, [&](const RunnerCall&) { ++calls; });
      last = r.handle;
      run(*find_runner("the_op", std::string_view(name)), request());
      // Somebody else's, which may end at any moment.
      if (const RegisteredRunnerPtr other = registered_runner(last))
        run(*other, request());
      else
        ++stale;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(calls + stale, 2 * kThreads * kRounds);
  EXPECT_TRUE(registered_runners().empty());
}

TEST(RunnerRegistry, AForkedChildHasItsParentsRunnersEvenIfOtherThreadsAreInTheRegistry) {
  std::atomic<bool> done{false};
  const Registered r(kLinear, "inherited");
  std::thread busy([&] {
    while (!done) const Registered other(kLinear);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a deadlock ends the child, not the test run
      const bool same = find_runner("the_op", std::string_view("inherited"))->handle == r.handle;
      const int64_t own = register_runner(std::make_shared<Scripted>(kLinear));
      unregister_runner(own);
      _exit(same && own > r.handle ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    ASSERT_EQ(status, 0) << "fork " << i;
  }
  done = true;
  busy.join();
}

}  // namespace
}  // namespace quire::testing
