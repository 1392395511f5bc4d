// The only file that reads the environment. None of these variables changes a quantized byte.
#pragma once

#include <string>

namespace quire::env {

/// QUIRE_ISA: forces the instruction set of the CPU kernels (scalar, avx2, avx512). Read once.
const std::string& isa();

/// QUIRE_KERNEL: forces one kernel row, `OPERATION:NAME` such as `gemm:reference`; several are separated by commas.
/// Read once.
const std::string& kernel();

/// QUIRE_SELF_CHECK: `off` uses rows of a GPU without comparing them with its reference first (cuda/self_check.h). Read
/// once.
const std::string& self_check();

}  // namespace quire::env
