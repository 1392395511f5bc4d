// A runner's calls take memory from the workspace of their context alone, once threads have their scratch: as much
// whatever goes where.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "inputs.h"
#include "mixtures.h"
#include "quire/base/check.h"
#include "quire/base/parallel.h"
#include "quire/runner/linear_runner.h"

namespace {

std::atomic<int64_t> allocations{0};

void* counted(size_t size, size_t alignment) {
  ++allocations;
  const size_t whole = (size + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, whole > 0 ? whole : alignment);
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

// Those of the whole process, the library's included.
void* operator new(size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(size_t size, std::align_val_t alignment) { return counted(size, static_cast<size_t>(alignment)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace quire::testing {
namespace {

constexpr int64_t kExperts = 6, kHidden = 128, kInner = 96, kTopK = 2;

/// An executor of two threads, this one and another that waits for work.
class TwoThreads {
 public:
  TwoThreads() {
    before_ = set_executor([this](int64_t count, int64_t, FunctionRef<void(int64_t, int64_t)> body) {
      if (inside || count < 2) return body(0, count);
      both([&] { body(count / 2, count); }, [&] { body(0, count / 2); });
    });
  }
  ~TwoThreads() {
    set_executor(before_);
    both([this] { done_ = true; }, [] {});
    thread_.join();
  }

  /// Runs one function on the other thread and one here; ranges within them run where they are.
  void both(FunctionRef<void()> there, FunctionRef<void()> here) {
    set_task(&there);
    inside = true;
    here();
    inside = false;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return task_ == nullptr; });
  }

 private:
  void set_task(FunctionRef<void()>* task) {
    {
      const std::lock_guard lock(mutex_);
      task_ = task;
    }
    changed_.notify_all();
  }
  void work() {
    inside = true;
    while (!done_) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return task_ != nullptr; });
      }
      (*task_)();
      set_task(nullptr);
    }
  }

  static inline thread_local bool inside = false;
  Executor before_;
  std::mutex mutex_;
  std::condition_variable changed_;
  FunctionRef<void()>* task_ = nullptr;
  bool done_ = false;
  std::thread thread_{[this] { work(); }};
};

/// Formats of x and w, with which x has a static scale or not.
struct Formats {
  std::string_view x, w;
  bool calibrated = false;
};
constexpr Formats kFormats[] = {
    {"nvfp4", "nvfp4"},
    {"nvfp4", "nvfp4", true},
    {"nvfp4:row_scaled", "nvfp4:16x16"},
    {"nvfp4:4over6=mae", "nvfp4"},
    {"mxfp8", "mxfp8"},
    {"mxfp8:swizzled", "mxfp8:swizzled"},
    {"mxfp4", "mxfp4"},
    {"fp8_tensor", "fp8_tensor"},
    {"fp8_row", "fp8_row"},
    {"fp8_block", "fp8_block:128x128"},
};
WeightOptions options_of(const Formats& f) {
  return {.input_scales = f.calibrated ? std::vector{0.01f} : std::vector<float>{}};
}

/// Memory that is there before a call.
class LentMemory final : public Workspace {
 public:
  void* allocate(int64_t bytes) override {
    const int64_t begin = used_;
    used_ += round_up(bytes, 64);
    check(used_ <= std::ssize(memory_) - 64, "the test lends too little memory");
    auto* const first = memory_.data() + 64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    return first + begin;
  }
  int64_t used() const { return used_; }
  void reset() { used_ = 0; }

 private:
  std::vector<std::byte> memory_{size_t{1} << 23};
  int64_t used_ = 0;
};

/// A call of a runner with memory of its own.
class Call {
 public:
  Call(quire::Runner& runner, const Matrix& x, int load)
      : runner_(runner), out_(static_cast<size_t>(x.rows * runner.info().out_features)) {
    Random random(static_cast<uint64_t>(load));
    for (int64_t i = 0; i < x.rows * kTopK; ++i)
      ids_.push_back(load == 0 ? 3 : static_cast<int32_t>(random.below(kExperts + 1)) - 1);
    weights_.assign(ids_.size(), 0.5f);
    call_ = {.x = x,
             .out = {out_.data(), DType::bf16, x.rows, runner.info().out_features, runner.info().out_features},
             .expert_ids = ids_.data(),
             .expert_weights = weights_.data(),
             .top_k = kTopK};
    call_.context = host();
    call_.context.workspace = lent_.get();
  }
  void run() const {
    lent_->reset();
    runner_.run(call_);
  }
  /// Without a workspace.
  void run_on_the_heap() const {
    RunnerCall call = call_;
    call.context.workspace = nullptr;
    runner_.run(call);
  }
  /// Bytes of the workspace that the last call took.
  int64_t taken() const { return lent_->used(); }

 private:
  quire::Runner& runner_;
  std::unique_ptr<LentMemory> lent_ = std::make_unique<LentMemory>();
  std::vector<uint16_t> out_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  RunnerCall call_;
};

/// Allocations of calls with other loads, once both threads have computed.
int64_t allocations_of(quire::Runner& runner, const Matrix& x, TwoThreads& threads) {
  const Call all_to_one(runner, x, 0), some(runner, x, 1), others(runner, x, 2);
  for (int warm_up = 0; warm_up < 2; ++warm_up) threads.both([&] { some.run(); }, [&] { others.run(); });
  for (int warm_up = 0; warm_up < 2; ++warm_up) some.run();
  const int64_t before = allocations;
  for (int round = 0; round < 5; ++round)
    for (const Call* call : {&all_to_one, &some, &others}) call->run();
  EXPECT_TRUE(all_to_one.taken() == some.taken() && some.taken() == others.taken())
      << all_to_one.taken() << ", " << some.taken() << " and " << others.taken() << " bytes of the workspace";
  return allocations - before;
}

TEST(Allocations, AMixtureHasNoneBesideItsWorkspace) {
  const Input w13({kExperts * 2 * kInner, kHidden}, DType::bf16, Kind::normal, 1),
      w2({kExperts * kHidden, kInner}, DType::bf16, Kind::normal, 2);
  TwoThreads threads;
  for (const Formats& f : kFormats)
    for (const bool on_input : {false, true}) {
      const QuantSpec x_spec = QuantSpec::parse(f.x), w_spec = QuantSpec::parse(f.w);
      WeightOptions all = options_of(f);
      all.count = kExperts;
      Experts shared{PreparedWeight(slice(w13, 0, 2 * kInner), w_spec, options_of(f)),
                     PreparedWeight(slice(w2, 0, kHidden), w_spec, options_of(f))};
      MoeRunner runner({PreparedWeight(w13, w_spec, all), PreparedWeight(w2, w_spec, all)},
                       {.x = x_spec, .activation = Activation::parse("swiglu"), .weight_on_input = on_input},
                       std::move(shared));
      for (const int64_t tokens : {1, 7, 300}) {
        SCOPED_TRACE(text("x=", f.x, f.calibrated ? " calibrated" : "", ", w=", f.w, ", ", tokens, " tokens"));
        const Input x({tokens, kHidden, 5}, DType::bf16, Kind::normal, 3);
        EXPECT_EQ(allocations_of(runner, x, threads), 0);
      }
    }
}

TEST(Allocations, ALinearLayerHasNoneBesideItsWorkspace) {
  const Input w({640, kHidden}, DType::bf16, Kind::normal, 1);
  TwoThreads threads;
  for (const Formats& f : kFormats)
    for (const int64_t tokens : {1, 16, 500}) {
      SCOPED_TRACE(text("x=", f.x, f.calibrated ? " calibrated" : "", ", w=", f.w, ", ", tokens, " tokens"));
      LinearRunner runner({w, QuantSpec::parse(f.w), options_of(f)}, QuantSpec::parse(f.x));
      const Input x({tokens, kHidden}, DType::bf16, Kind::normal, 3);
      EXPECT_EQ(allocations_of(runner, x, threads), 0);
    }
}

TEST(Allocations, ExpertsWhoseInputsAreNotQuantizedShareTheMemoryOfOneDecodedWeight) {
  const Input w13({kExperts * 2 * kInner, kHidden}, DType::bf16, Kind::normal, 1),
      w2({kExperts * kHidden, kInner}, DType::bf16, Kind::normal, 2), x({7, kHidden}, DType::bf16, Kind::normal, 3);
  MoeRunner runner(experts_of(w13, w2, kExperts, QuantSpec::parse("nvfp4")),
                   {.x = InputSpec::parse("none"), .activation = Activation::parse("swiglu")});
  const Call call(runner, x, 1);
  call.run();
  const int64_t decoded = 2 * kInner * kHidden * 2, rows = 7 * kTopK * (2 * kHidden + 2 * kInner) * 2;
  EXPECT_LT(call.taken(), 2 * (decoded + rows)) << "of " << kExperts << " experts";
}

TEST(Allocations, AreSeenWhereThereAreSome) {
  const Input w({640, kHidden}, DType::bf16, Kind::normal, 1), x({512, kHidden}, DType::bf16, Kind::normal, 3);
  LinearRunner runner({w, QuantSpec::parse("nvfp4")}, QuantSpec::parse("nvfp4"));
  TwoThreads threads;  // of a pool, one could have its first task, and its scratch, only in the last call
  const Call call(runner, x, 0);
  for (int warm_up = 0; warm_up < 2; ++warm_up) call.run();
  const int64_t before = allocations;
  std::thread([&] { call.run(); }).join();
  const int64_t of_thread = allocations - before;
  EXPECT_GT(of_thread, 1) << "a new thread's scratch";
  EXPECT_GT(call.taken(), 512 * kHidden / 2) << "bytes of the workspace";
  call.run_on_the_heap();
  EXPECT_EQ(allocations - before - of_thread, 2) << "its memory, and who owns it";
}

}  // namespace
}  // namespace quire::testing
