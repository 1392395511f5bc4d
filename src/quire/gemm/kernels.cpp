#include "quire/gemm/kernels.h"

#include <array>

#include "quire/cpu/isa.h"
#include "quire/gemm/reference.h"

namespace quire {
namespace {

using GemmRow = KernelRow<GemmProblem>;
using ColumnSumRow = KernelRow<ColumnSumProblem>;

constexpr std::array kGemm{
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
