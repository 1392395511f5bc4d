#include "quire/gemm/kernels.h"

#include <array>

#include "quire/cpu/isa.h"
#include "quire/gemm/reference.h"

namespace quire {
namespace {

using GemmRow = KernelRow<GemmProblem>;
using ColumnSumRow = KernelRow<ColumnSumProblem>;

/// Empty, or what keeps this machine, or QUIRE_ISA, from lanes of a kind.
std::string without(const cpu::Product* product, std::string_view lanes) {
  return product ? "" : text("instruction set ", cpu::active().name, " has no products of ", lanes);
}

std::string refuse_int8(const GemmProblem& p) {
  for (const Operand* o : {&p.a, &p.b})
    if (!o->spec.packed()) return text("takes 4-bit codes, but ", o == &p.a ? "a" : "b", " is ", o->spec.to_string());
  return without(cpu::active().int8, "int8");
}

std::string refuse_amx(const GemmProblem& p) {
  constexpr int64_t depth = 32;
  for (const Operand* o : {&p.a, &p.b})
    if (o->spec.row().scope == Scope::block && o->spec.row().block < depth)
      return text("takes blocks of at least ", depth, ", but ", o == &p.a ? "a" : "b", " is ", o->spec.to_string());
  return without(cpu::active().amx, "bfloat16 tiles");
}

std::string refuse_bf16(const GemmProblem&) { return without(cpu::active().bf16, "bfloat16"); }

constexpr std::array kGemm{
    GemmRow{"int8", refuse_int8, [](const GemmProblem& p) { (*cpu::active().int8)(p); }},
    GemmRow{"amx", refuse_amx, [](const GemmProblem& p) { (*cpu::active().amx)(p); }},
    GemmRow{"bf16", refuse_bf16, [](const GemmProblem& p) { (*cpu::active().bf16)(p); }},
    GemmRow{"generic", takes_all, [](const GemmProblem& p) { cpu::active().kernels->gemm(p); }},
    GemmRow{"reference", takes_all, reference::gemm},
};

constexpr std::array kColumnSum{
    ColumnSumRow{"generic", takes_all, [](const ColumnSumProblem& p) { cpu::active().kernels->column_sum(p); }},
    ColumnSumRow{"reference", takes_all, reference::column_sum},
};

}  // namespace

std::string to_string(const ColumnSumProblem& p) {
  return text("column_sum ", name(p.x.dtype), " [", p.x.rows, ", ", p.x.cols, "] to ", name(p.out_dtype));
}

std::span<const GemmRow> gemm_kernels() { return kGemm; }
std::span<const ColumnSumRow> column_sum_kernels() { return kColumnSum; }

}  // namespace quire
