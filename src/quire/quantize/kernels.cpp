#include "quire/quantize/kernels.h"

#include <array>

#include "quire/cpu/isa.h"
#include "quire/quantize/fingerprint.h"
#include "quire/quantize/reference.h"
#include "quire/quantize/reorder.h"

namespace quire {
namespace {

using QuantizeRow = KernelRow<QuantizeProblem>;
using DequantizeRow = KernelRow<DequantizeProblem>;

constexpr std::array kQuantize{
    QuantizeRow{"generic", takes_all,
                [](const QuantizeProblem& p) { quantize_plain(p, cpu::active().kernels->quantize); }},
    QuantizeRow{"reference", takes_all, reference::quantize},
};

constexpr std::array kDequantize{
    DequantizeRow{"generic", takes_all,
                  [](const DequantizeProblem& p) { dequantize_plain(p, cpu::active().kernels->dequantize); }},
    DequantizeRow{"reference", takes_all, reference::dequantize},
};

}  // namespace

std::span<const QuantizeRow> quantize_kernels() { return kQuantize; }
std::span<const DequantizeRow> dequantize_kernels() { return kDequantize; }

uint64_t fingerprint(const Matrix& x) { return cpu::active().kernels->fingerprint(x); }

}  // namespace quire
