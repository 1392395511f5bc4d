#include "quire/gemm/kernels.h"

#include <array>

#include "quire/cpu/isa.h"
#include "quire/gemm/reference.h"

namespace quire {
namespace {

using GemmRow = KernelRow<GemmProblem>;
using ColumnSumRow = KernelRow<ColumnSumProblem>;

/// Whether this machine, or QUIRE_ISA, has no lanes of a kind.
bool lacks(const cpu::Product* product, std::string_view lanes, std::string* why) {
  return !product && refused(why, "instruction set ", cpu::active().name, " has no products of ", lanes);
}

bool refuses_int8(const GemmProblem& p, std::string* why) {
  for (const Operand* o : {&p.a, &p.b})
    if (!o->spec.packed()) return refused(why, "takes 4-bit codes, but ", o == &p.a ? "a" : "b", " is ", o->spec);
  return lacks(cpu::active().int8, "int8", why);
}

bool refuses_amx_nvfp4(const GemmProblem& p, std::string* why) {
  for (const Operand* o : {&p.a, &p.b})
    if (o->spec.row().scale != ScaleKind::e4m3)
      return refused(why, "takes block scales in e4m3, but ", o == &p.a ? "a" : "b", " is ", o->spec);
  constexpr int64_t least = 32;  // below, decoding the weight takes most of the time, and less of it in int8
  if (p.a.outer < least)
    return refused(why, "takes ", least, " rows or more, but a has ", p.a.outer, ", which int8 multiplies faster");
  return lacks(cpu::active().amx_nvfp4, "bfloat16 tiles", why);
}

bool refuses_amx(const GemmProblem& p, std::string* why) {
  constexpr int64_t depth = 32;
  for (const Operand* o : {&p.a, &p.b})
    if (o->spec.row().scope == Scope::block && o->spec.row().block < depth)
      return refused(why, "takes blocks of at least ", depth, ", but ", o == &p.a ? "a" : "b", " is ", o->spec);
  return lacks(cpu::active().amx, "bfloat16 tiles", why);
}

bool refuses_bf16(const GemmProblem&, std::string* why) { return lacks(cpu::active().bf16, "bfloat16", why); }

constexpr std::array kGemm{
    GemmRow{"amx_nvfp4", refuses_amx_nvfp4, [](const GemmProblem& p) { (*cpu::active().amx_nvfp4)(p); }},
    GemmRow{"int8", refuses_int8, [](const GemmProblem& p) { (*cpu::active().int8)(p); }},
    GemmRow{"amx", refuses_amx, [](const GemmProblem& p) { (*cpu::active().amx)(p); }},
    GemmRow{"bf16", refuses_bf16, [](const GemmProblem& p) { (*cpu::active().bf16)(p); }},
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
