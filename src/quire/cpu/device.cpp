#include "quire/cpu/device.h"

#include <array>

#include "quire/base/fault.h"
#include "quire/cpu/groups/groups.h"
#include "quire/cpu/isa.h"
#include "quire/cpu/moe/moe.h"
#include "quire/cpu/reorder.h"
#include "quire/cpu/state.h"
#include "quire/device/library.h"
#include "quire/reference/gemm.h"
#include "quire/reference/pointwise.h"
#include "quire/reference/quantize.h"
#include "quire/spec/scale.h"

namespace quire::cpu {
namespace {

/// Whether this machine, or QUIRE_ISA, has no lanes of a kind. Asked before what a problem has, which no user can mend
/// then.
bool lacks(const GemmKernel* product, std::string_view lanes, Refusal* refusal) {
  return !product && refused_here(refusal, "instruction set ", active().name, " has no products of ", lanes);
}

bool refuses_int8(const GemmProblem& p, const Context&, Refusal* refusal) {
  if (lacks(active().int8, "int8", refusal)) return true;
  for (const Operand* o : {&p.a, &p.b})
    if (!o->spec.packed()) return refused(refusal, "takes 4-bit codes, but ", o == &p.a ? "a" : "b", " is ", o->spec);
  return false;
}

/// It and int8 sum in other orders, so rows that must not depend on their number have it for every number.
bool refuses_amx_nvfp4(const GemmProblem& p, const Context& context, Refusal* refusal) {
  if (lacks(active().amx_nvfp4, "bfloat16 tiles", refusal)) return true;
  for (const Operand* o : {&p.a, &p.b})
    if (o->spec.row().scale != ScaleKind::two_level)
      return refused(refusal, "takes two-level block scales, but ", o == &p.a ? "a" : "b", " is ", o->spec);
  constexpr int64_t least = 32;  // below, decoding the weight takes most of the time, and less of it in int8
  return !context.batch_invariant && p.a.outer < least &&
         refused(refusal, "takes ", least, " rows or more, but a has ", p.a.outer, ", which int8 multiplies faster");
}

bool refuses_amx(const GemmProblem& p, const Context&, Refusal* refusal) {
  if (lacks(active().amx, "bfloat16 tiles", refusal)) return true;
  constexpr int64_t depth = 32;
  for (const Operand* o : {&p.a, &p.b})
    if (o->spec.row().scope == Scope::block && o->spec.row().block < depth)
      return refused(refusal, "takes blocks of at least ", depth, ", but ", o == &p.a ? "a" : "b", " is ", o->spec);
  return false;
}

bool refuses_bf16(const GemmProblem&, const Context&, Refusal* refusal) {
  return lacks(active().bf16, "bfloat16", refusal);
}

/// Kernels take a problem, and a context if they need one.
template <auto Run, class Problem>
void run(const Problem& p, const Context& context) {
  if constexpr (requires { Run(p, context); })
    Run(p, context);
  else
    Run(p);
}

/// What a row runs: a kernel that takes a tensor, and groups where problems may have them, which it cuts.
template <class Problem, auto Run>
void taking_groups(const Problem& p, const Context& context) {
  if constexpr (requires { p.in_groups(); })
    if (p.in_groups()) return run_groups(p, context);
  run<Run>(p, context);
}

template <const GemmKernel* Isa::* Product>
void multiply(const GemmProblem& p) {
  (*(active().*Product))(p);
}

constexpr std::array kGemm{
    KernelRow<GemmProblem>{"amx_nvfp4", refuses_amx_nvfp4, taking_groups<GemmProblem, multiply<&Isa::amx_nvfp4>>},
    KernelRow<GemmProblem>{"int8", refuses_int8, taking_groups<GemmProblem, multiply<&Isa::int8>>},
    KernelRow<GemmProblem>{"amx", refuses_amx, taking_groups<GemmProblem, multiply<&Isa::amx>>},
    KernelRow<GemmProblem>{"bf16", refuses_bf16, taking_groups<GemmProblem, multiply<&Isa::bf16>>},
    KernelRow<GemmProblem>{"generic", nullptr,
                           taking_groups<GemmProblem, [](const GemmProblem& p) { active().kernels->gemm(p); }>},
    KernelRow<GemmProblem>{"reference", nullptr, taking_groups<GemmProblem, reference::gemm>},
};

/// The kernel of the instruction set in use, then the reference.
template <class Problem, void (*Kernels::*Generic)(const Problem&), void (*Reference)(const Problem&)>
constexpr std::array<KernelRow<Problem>, 2> kRows{{
    {"generic", nullptr, taking_groups<Problem, [](const Problem& p) { (active().kernels->*Generic)(p); }>},
    {"reference", nullptr, taking_groups<Problem, Reference>},
}};

[[noreturn]] void raise_given_scale(const QuantizeProblem& p) {
  raise(text("quantize: the static scale of ", p.spec), ValueRule::given_scale, {.number = *p.scale});
}
void check_given_amax(const float* amax, int64_t count) {
  for (int64_t i = 0; amax && i < count; ++i)
    if (!(amax[i] >= 0)) raise("quantize", ValueRule::given_amax, {.index = i, .number = amax[i]});
}
/// The rules of values that the caller gives to a quantization.
void check_given(const QuantizeProblem& p) {
  if (p.spec.given && p.scale && !(*p.scale > 0 && is_finite(*p.scale))) raise_given_scale(p);
  check_given_amax(p.amax.rowwise, amax_count(p.spec, p.x.rows));
  check_given_amax(p.amax.columnwise, amax_count(p.spec, p.x.cols));
}

/// The same of results that may be quantized.
template <class Problem, void (*Kernels::*Generic)(const Problem&), void (*Reference)(const Problem&)>
constexpr std::array<KernelRow<Problem>, 2> kProducers{{
    {"generic", nullptr,
     taking_groups<Problem,
                   [](const Problem& p) {
                     check_given(p.out.quantization());
                     (active().kernels->*Generic)(p);
                   }>},
    {"reference", nullptr,
     taking_groups<Problem,
                   [](const Problem& p) {
                     check_given(p.out.quantization());
                     Reference(p);
                   }>},
}};

/// The one kernel of a problem, in plain C++.
template <class Problem, void (*Run)(const Problem&, const Context&)>
constexpr std::array<KernelRow<Problem>, 1> kPortable{{{"portable", nullptr, taking_groups<Problem, Run>}}};

/// A quantization whose values have been read and checked.
template <void (*Run)(const QuantizeProblem&)>
void quantize(const QuantizeProblem& problem, const Context&) {
  check_given(problem);
  if (!problem.random.state && !problem.random.part) return Run(problem);
  QuantizeProblem p = problem;
  p.random = problem.random.read();
  Run(p);
}

void quantize_generic(const QuantizeProblem& p) {
  if (p.spec.interleaved) return quantize_interleaved(p, active().kernels->quantize);
  active().kernels->quantize(p);
}
void dequantize_generic(const DequantizeProblem& p) {
  if (p.spec.interleaved) return dequantize_interleaved(p, active().kernels->dequantize);
  active().kernels->dequantize(p);
}

constexpr std::array kQuantize{
    KernelRow<QuantizeProblem>{"generic", nullptr, taking_groups<QuantizeProblem, quantize<quantize_generic>>},
    KernelRow<QuantizeProblem>{"reference", nullptr, taking_groups<QuantizeProblem, quantize<reference::quantize>>},
};
constexpr std::array kDequantize{
    KernelRow<DequantizeProblem>{"generic", nullptr, taking_groups<DequantizeProblem, dequantize_generic>},
    KernelRow<DequantizeProblem>{"reference", nullptr, taking_groups<DequantizeProblem, reference::dequantize>},
};

bool refuses_matmul(const MatmulProblem&, const Context&, Refusal* refusal) {
  return !matmul_in_use() && refused_here(refusal, "no library is lent to multiply plain matrices (set_matmul)");
}

bool refuses_amx_matmul(const MatmulProblem& p, const Context&, Refusal* refusal) {
  if (!active().amx_matmul)
    return refused_here(refusal, "instruction set ", active().name, " has no tiles of bfloat16");
  return p.out.dtype != DType::bf16 && refused(refusal, "takes results in bfloat16, but out is ", name(p.out.dtype));
}

/// The library's sums depend on the number of rows and on where they lie.
constexpr std::array kMatmul{
    KernelRow<MatmulProblem>{
        "library", varies<MatmulProblem, refuses_matmul>,
        taking_groups<MatmulProblem, [](const MatmulProblem& p, const Context& c) { matmul_in_use()(p, c); }>},
    KernelRow<MatmulProblem>{"amx", refuses_amx_matmul,
                             taking_groups<MatmulProblem, [](const MatmulProblem& p) { (*active().amx_matmul)(p); }>},
    KernelRow<MatmulProblem>{"generic", nullptr,
                             taking_groups<MatmulProblem, [](const MatmulProblem& p) { active().kernels->matmul(p); }>},
    KernelRow<MatmulProblem>{"reference", nullptr, taking_groups<MatmulProblem, reference::matmul>},
};

void fingerprint(const FingerprintProblem& p, const Context&) {
  const auto found = static_cast<int64_t>(active().kernels->fingerprint(p.x));
  if (p.to) *p.to = found;
  if (p.expected && *p.expected != found) raise(p.what, ValueRule::stale_codes, {});
}

}  // namespace

const Device& device() {
  static constexpr Device kDevice{"cpu",
                                  {kQuantize,
                                   kRows<AmaxProblem, &Kernels::amax, reference::amax>,
                                   kDequantize,
                                   kPortable<ReorderProblem, reorder>,
                                   kGemm,
                                   kMatmul,
                                   kRows<ColumnSumProblem, &Kernels::column_sum, reference::column_sum>,
                                   kProducers<NormProblem, &Kernels::norm, reference::norm>,
                                   kRows<NormGradProblem, &Kernels::norm_grad, reference::norm_grad>,
                                   kProducers<ActivationProblem, &Kernels::activation, reference::activation>,
                                   kRows<ActivationGradProblem, &Kernels::activation_grad, reference::activation_grad>,
                                   kPortable<RouteProblem, route>,
                                   kPortable<RouteGradProblem, route_grad>,
                                   kPortable<CapacityProblem, limit_capacity>,
                                   kPortable<PermuteProblem, permute>,
                                   kPortable<UnpermuteProblem, unpermute>,
                                   kPortable<PermutedDotProblem, permuted_dot>,
                                   kPortable<ExpertRowsProblem, expert_rows>,
                                   kPortable<ChunkRowsProblem, chunk_rows>,
                                   kPortable<FingerprintProblem, fingerprint>,
                                   kPortable<AdvanceProblem, advance>,
                                   kPortable<MaximumProblem, maximum>,
                                   kPortable<CollectProblem, delayed_collect>,
                                   kPortable<DelayedUpdateProblem, delayed_update>}};
  return kDevice;
}

}  // namespace quire::cpu
