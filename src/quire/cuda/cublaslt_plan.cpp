#include "quire/cuda/cublaslt_plan.h"

#include <map>
#include <utility>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/cuda/launch.h"

namespace quire::cuda {
namespace {

/// PyTorch's, on chips from 9.0 on. Without a split along the contraction little of it is used.
constexpr size_t kMostWorkspaceBytes = size_t{32} << 20;

const lt::Functions& functions() {
  const lt::Functions* const found = driver().cublaslt();
  check(found != nullptr, "gemm: cuBLASLt is not on this machine; set QUIRE_KERNEL=gemm:decode32");
  return *found;
}

constexpr int kNotSupported = 15;  ///< CUBLAS_STATUS_NOT_SUPPORTED

/// The first failure of several calls, as cublasStatus_t.
class Status {
 public:
  void then(int status) {
    if (first_ == lt::kSuccess) first_ = status;
  }
  int first() const { return first_; }

 private:
  int first_ = lt::kSuccess;
};

/// What describes a product to cuBLASLt, while it lives.
class Description {
 public:
  Description(const ProductShape& s, const ProductMemory& memory) : lt_(functions()) {
    status.then(lt_.MatmulDescCreate(&desc, lt::kComputeF32, lt::kF32));
    if (s.a.transposed) set(lt::kTransposeA, lt::kTransposed);
    if (s.b.transposed) set(lt::kTransposeB, lt::kTransposed);
    // Scalars are what libraries before 12.8 know without being told.
    if (s.a.scales != lt::kScalar) set(lt::kScaleModeOfA, static_cast<int32_t>(s.a.scales));
    if (s.b.scales != lt::kScalar) set(lt::kScaleModeOfB, static_cast<int32_t>(s.b.scales));
    if (s.factors) set(lt::kPointerMode, lt::kPointersOfDevice);
    if (s.bias) set(lt::kBiasType, static_cast<int32_t>(*s.bias));
    set(lt::kFastAccumulation, int8_t{0});
    set(lt::kEpilogue, s.bias ? lt::kBiasEpilogue : lt::kPlainEpilogue);
    set(lt::kScalesOfA, memory.a_scales), set(lt::kScalesOfB, memory.b_scales);
    if (s.bias) set(lt::kBiasPointer, memory.bias);
    make(a, s.a.codes), make(b, s.b.codes), make(d, s.d);
  }
  ~Description() {
    for (const lt::Layout layout : {a, b, d})
      if (layout) lt_.MatrixLayoutDestroy(layout);
    if (desc) lt_.MatmulDescDestroy(desc);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  Status status;
  lt::Desc desc = nullptr;
  lt::Layout a = nullptr, b = nullptr, d = nullptr;

 private:
  template <class Value>
  void set(lt::Attribute attribute, Value value) {
    if (desc) status.then(lt_.MatmulDescSetAttribute(desc, attribute, &value, sizeof value));
  }
  void make(lt::Layout& layout, const ProductMatrix& m) {
    status.then(lt_.MatrixLayoutCreate(&layout, m.type, static_cast<uint64_t>(m.rows), static_cast<uint64_t>(m.cols),
                                       m.stride));
  }

  const lt::Functions& lt_;
};

/// What an algorithm must keep to.
class Wishes {
 public:
  Wishes() : lt_(functions()) {
    status.then(lt_.MatmulPreferenceCreate(&preference));
    set(lt::kMostWorkspace, uint64_t{kMostWorkspaceBytes});
    set(lt::kReductions, lt::kNoReduction);
    for (const lt::Wish which : {lt::kAlignOfA, lt::kAlignOfB, lt::kAlignOfC, lt::kAlignOfD})
      set(which, kProductAlignment);
  }
  ~Wishes() {
    if (preference) lt_.MatmulPreferenceDestroy(preference);
  }
  Wishes(const Wishes&) = delete;
  Wishes& operator=(const Wishes&) = delete;

  Status status;
  lt::Preference preference = nullptr;

 private:
  template <class Value>
  void set(lt::Wish wish, Value value) {
    if (preference) status.then(lt_.MatmulPreferenceSetAttribute(preference, wish, &value, sizeof value));
  }

  const lt::Functions& lt_;
};

/// cuBLASLt of each device, and what it has answered there. Of each library, because tests replace it. The library is
/// called without the lock (ProcessMutex): of threads that ask at the same time, the first answer is kept.
class Plans {
 public:
  ProductPlan of(const ProductShape& shape, const ProductMemory& memory, const Context& context) {
    lt::Handle handle = nullptr;
    {
      const std::lock_guard lock(mutex_);
      const Known& known = of_device(context);
      if (const auto found = known.plans.find(shape); found != known.plans.end()) return found->second;
      handle = known.handle;
    }
    Status status;
    if (!handle) driver().within(context, [&] { status.then(functions().Create(&handle)); });
    if (status.first() != lt::kSuccess) return {.status = status.first()};
    handle = keep(handle, context);
    const ProductPlan plan = ask(handle, shape, memory, context);
    // Whatever else failed, such as memory that was short, may be there the next time.
    const bool lasting = plan.status == lt::kSuccess || plan.status == kNotSupported;
    return lasting ? keep(shape, plan, context) : plan;
  }

 private:
  struct Known {
    /// Made once and never destroyed, which would wait for the device. Several threads use it.
    lt::Handle handle = nullptr;
    std::map<ProductShape, ProductPlan> plans;
  };

  Known& of_device(const Context& context) { return known_[{&functions(), context.index}]; }

  /// The one that is kept: another thread may have been first.
  lt::Handle keep(lt::Handle made, const Context& context) {
    const std::lock_guard lock(mutex_);
    lt::Handle& handle = of_device(context).handle;
    if (!handle) handle = made;
    return handle;
  }

  ProductPlan keep(const ProductShape& shape, const ProductPlan& plan, const Context& context) {
    const std::lock_guard lock(mutex_);
    Known& known = of_device(context);
    if (known.plans.size() >= kMostPlans) known.plans.clear();
    return known.plans.emplace(shape, plan).first->second;
  }

  static ProductPlan ask(lt::Handle handle, const ProductShape& shape, const ProductMemory& memory,
                         const Context& context) {
    const Description product(shape, memory);
    const Wishes wishes;
    Status status = product.status;
    status.then(wishes.status.first());
    lt::Heuristic answer{};
    int found = 0;
    if (status.first() == lt::kSuccess)
      driver().within(context, [&] {
        status.then(functions().MatmulAlgoGetHeuristic(handle, product.desc, product.a, product.b, product.d, product.d,
                                                       wishes.preference, 1, &answer, &found));
      });
    status.then(found == 0 ? kNotSupported : answer.status);
    return {handle, answer.algorithm, answer.workspace, status.first()};
  }

  ProcessMutex mutex_;
  std::map<std::pair<const lt::Functions*, int>, Known> known_;
};

Plans& plans() {
  static constinit Lazy<Plans> all;
  return all.get();
}

}  // namespace

ProductPlan plan_of(const ProductShape& shape, const ProductMemory& memory, const Context& context) {
  return plans().of(shape, memory, context);
}

void run_product(const ProductShape& shape, const ProductMemory& memory, const Context& context) {
  const ProductPlan plan = plan_of(shape, memory, context);
  const Description product(shape, memory);
  Status status = product.status;
  status.then(plan.status);
  void* const workspace =
      plan.workspace > 0 ? lend_aligned(context, static_cast<int64_t>(plan.workspace), 256) : nullptr;
  if (status.first() == lt::kSuccess)
    driver().within(context, [&] {
      status.then(functions().Matmul(plan.handle, product.desc, memory.alpha, memory.a, product.a, memory.b, product.b,
                                     memory.beta, memory.c, product.d, memory.d, product.d, &plan.algorithm, workspace,
                                     plan.workspace, static_cast<lt::Stream>(context.stream)));
    });
  check(status.first() == lt::kSuccess, "gemm: cuBLASLt failed with status ", status.first(),
        "; set QUIRE_KERNEL=gemm:decode32 to multiply without it");
}

}  // namespace quire::cuda
