#include "quire/cpu/isa.h"

#include <array>
#include <string>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "quire/base/check.h"
#include "quire/base/env.h"

namespace quire::cpu {
namespace {

#if defined(__x86_64__)
/// Linux gives tiles to a process that asks for them (arch_prctl ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long request = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

// The builtin takes nothing but literals.
constexpr std::array kFeatures{
    Feature{"amx_int8", [] { return __builtin_cpu_supports("amx-int8") != 0; }},
    Feature{"amx_tile", [] { return __builtin_cpu_supports("amx-tile") != 0 && may_use_tiles(); }},
    Feature{"amx_bf16", [] { return __builtin_cpu_supports("amx-bf16") != 0; }},
    Feature{"avx512_bf16", [] { return __builtin_cpu_supports("avx512bf16") != 0; }},
    Feature{"avx512vbmi", [] { return __builtin_cpu_supports("avx512vbmi") != 0; }},
    Feature{"avx512_vnni", [] { return __builtin_cpu_supports("avx512vnni") != 0; }},
    Feature{"avx512f", [] { return __builtin_cpu_supports("avx512f") != 0; }},
    Feature{"avx512bw", [] { return __builtin_cpu_supports("avx512bw") != 0; }},
    Feature{"avx512vl", [] { return __builtin_cpu_supports("avx512vl") != 0; }},
    Feature{"avx512dq", [] { return __builtin_cpu_supports("avx512dq") != 0; }},
    Feature{"avx2", [] { return __builtin_cpu_supports("avx2") != 0; }},
    Feature{"fma", [] { return __builtin_cpu_supports("fma") != 0; }},
    Feature{"f16c", [] { return __builtin_cpu_supports("f16c") != 0; }},
};
constexpr std::array kAvx2VnniFeatures{
    Feature{"avx_vnni", [] { return __builtin_cpu_supports("avxvnni") != 0; }},
    kFeatures[10],
    kFeatures[11],
    kFeatures[12],
};

#elif defined(__aarch64__)
/// Whether Linux says that a process may use a feature. Their names here are those in /proc/cpuinfo.
bool listed(unsigned long type, unsigned long bit) { return (getauxval(type) & bit) != 0; }

constexpr std::array kFeatures{
    Feature{"bf16", [] { return listed(AT_HWCAP2, HWCAP2_BF16); }},
    Feature{"asimddp", [] { return listed(AT_HWCAP, HWCAP_ASIMDDP); }},
};
#endif

constexpr std::array kIsas{
#if defined(__x86_64__)
    Isa{"avx512_amx", kFeatures, &avx512::kKernels, &avx512_amx::kInt8, &avx512_bf16::kBf16, &avx512_amx::kBf16,
        &avx512_amx::kNvfp4, &avx512_amx::kMatmul},
    Isa{"avx512_bf16", std::span(kFeatures).last<10>(), &avx512::kKernels, &avx512_vnni::kInt8, &avx512_bf16::kBf16},
    Isa{"avx512_vnni", std::span(kFeatures).last<8>(), &avx512::kKernels, &avx512_vnni::kInt8},
    Isa{"avx512", std::span(kFeatures).last<7>(), &avx512::kKernels, &avx512_int8::kInt8},
    Isa{"avx2_vnni", kAvx2VnniFeatures, &avx2::kKernels, &avx2_vnni::kInt8},
    Isa{"avx2", std::span(kFeatures).last<3>(), &avx2::kKernels, &avx2_int8::kInt8},
#elif defined(__aarch64__)
    Isa{"neon_bf16", kFeatures, &neon::kKernels, &neon_dot::kInt8, &neon_bf16::kBf16},
    Isa{"neon_dot", std::span(kFeatures).last<1>(), &neon::kKernels, &neon_dot::kInt8},
    Isa{"neon", {}, &neon::kKernels},
#endif
    Isa{"scalar", {}, &scalar::kKernels},
};

}  // namespace

const Isa& choose() {
  const std::string& wanted = env::isa();
  std::string names;
  for (const Isa& isa : kIsas) {
    if (wanted.empty() ? isa.supported() : isa.name == wanted) {
      check(isa.supported(), "cpu: QUIRE_ISA=", wanted, " needs ", isa.missing(),
            ", which this machine lacks; unset QUIRE_ISA or name a supported one");
      return isa;
    }
    names += (names.empty() ? "" : ", ") + std::string(isa.name);
  }
  fail("cpu: QUIRE_ISA=", wanted, " is not an instruction set; use one of ", names);
}

std::string Isa::missing() const {
  std::string names;
  for (const Feature& feature : needs)
    if (!feature.present()) names += (names.empty() ? "" : ", ") + std::string(feature.name);
  return names;
}

std::span<const Isa> all() { return kIsas; }

std::vector<std::string_view> supported() {
  std::vector<std::string_view> names;
  for (const Isa& isa : kIsas)
    if (isa.supported()) names.push_back(isa.name);
  return names;
}

}  // namespace quire::cpu
