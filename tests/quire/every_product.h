// The products of every instruction set, and outputs for them.
#pragma once

#include <string>
#include <vector>

#include "guarded.h"
#include "lanes/lanes.h"
#include "quire/base/env.h"
#include "quire/cpu/isa.h"
#include "quire/format/element.h"
#include "quire/spec/scale_index.h"
#include "random_operand.h"

namespace quire::testing {

/// What kernels multiply.
enum class Takes : uint8_t { all, four_bits, nvfp4 };

/// A product of an instruction set.
struct Kernel {
  std::string name;
  cpu::GemmKernel run;
  Takes formats;
  const cpu::Kernels* others;
  int64_t shortest_block = 1;

  friend void PrintTo(const Kernel& kernel, std::ostream* out) { *out << kernel.name; }
  bool takes(const GemmProblem& p) const {
    for (const Operand* o : {&p.a, &p.b}) {
      if (formats != Takes::all && !o->spec.packed()) return false;
      if (formats == Takes::nvfp4 && o->spec.row().scale != ScaleKind::two_level) return false;
      if (block_length(o->spec, shortest_block) < shortest_block) return false;
    }
    return true;
  }
};

/// Those of this machine, or of the instruction set that QUIRE_ISA names.
inline std::vector<Kernel> kernels() {
  std::vector<Kernel> found;
  for (const cpu::Isa& isa : cpu::all()) {
    if (!isa.supported() || !(env::isa().empty() || env::isa() == isa.name)) continue;
    const std::string name(isa.name);
    found.push_back({name, isa.kernels->gemm, Takes::all, isa.kernels});
    if (isa.int8) found.push_back({name + "_in_int8", *isa.int8, Takes::four_bits, isa.kernels});
#if defined(__x86_64__)
    if (name == "avx512_vnni")
      found.push_back({"avx2_vnni_by_avx512", cpu::avx2_by_avx512::kInt8, Takes::four_bits, isa.kernels});
    if (name == "avx512_bf16") {
      found.push_back({"amx_in_plain", cpu::amx_in_plain::kBf16, Takes::all, isa.kernels, 32});
      found.push_back({"amx_nvfp4_in_plain", cpu::amx_in_plain::kNvfp4, Takes::nvfp4, isa.kernels});
      found.push_back({"amx_int8_in_plain", cpu::amx_in_plain::kInt8, Takes::four_bits, isa.kernels});
    }
#endif
    if (isa.bf16) found.push_back({name + "_in_bf16", *isa.bf16, Takes::all, isa.kernels});
    if (isa.amx) found.push_back({name + "_by_tiles", *isa.amx, Takes::all, isa.kernels, 32});
    if (isa.amx_nvfp4) found.push_back({name + "_by_tiles_nvfp4", *isa.amx_nvfp4, Takes::nvfp4, isa.kernels});
  }
  return found;
}

/// An output with gaps between its rows, and what is added to the product.
struct Output {
  int64_t rows, cols, stride;
  DType dtype;
  Guarded memory;
  Output(int64_t m, int64_t n, DType t, int64_t gap = 3)
      : rows(m), cols(n), stride(n + gap), dtype(t), memory(m * (n + gap) * size_of(t)) {}
  MutableMatrix view() { return {memory.data(), dtype, rows, cols, stride}; }
  float at(int64_t i, int64_t j) const { return load_element(memory.data(), dtype, i * stride + j); }
  /// Nothing was written around the matrix nor between its rows.
  bool intact() const {
    if (!memory.intact()) return false;
    const auto* bytes = memory.as<uint8_t>();
    const uint8_t unwritten = Guarded(1).as<uint8_t>()[0];
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t b = cols * size_of(dtype); b < stride * size_of(dtype); ++b)
        if (bytes[i * stride * size_of(dtype) + b] != unwritten) return false;
    return true;
  }
};

inline GemmProblem problem(const RandomOperand& a, const RandomOperand& b, Output& out) {
  GemmProblem p;
  p.a = a.operand, p.b = b.operand, p.out = out.view();
  return p;
}

}  // namespace quire::testing
