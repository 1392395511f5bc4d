#include "quire/cpu/isa.h"

#include <array>
#include <string>

#include "quire/base/check.h"
#include "quire/base/env.h"

namespace quire::cpu {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

constexpr std::array kIsas{
    Isa{"avx512", "avx512f, avx512bw, avx512vl, avx512dq", has_avx512, &avx512::kKernels},
    Isa{"avx2", "avx2, fma, f16c", has_avx2, &avx2::kKernels},
    Isa{"scalar", "nothing", always, &scalar::kKernels},
};
#else
constexpr std::array kIsas{Isa{"scalar", "nothing", always, &scalar::kKernels}};
#endif

const Isa& choose() {
  const std::string& wanted = env::isa();
  std::string names;
  for (const Isa& isa : kIsas) {
    if (wanted.empty() ? isa.supported() : isa.name == wanted) {
      check(isa.supported(), "cpu: QUIRE_ISA=", wanted, " needs ", isa.needs,
            ", which this machine lacks; unset QUIRE_ISA or name a supported one");
      return isa;
    }
    names += (names.empty() ? "" : ", ") + std::string(isa.name);
  }
  fail("cpu: QUIRE_ISA=", wanted, " is not an instruction set; use one of ", names);
}

}  // namespace

std::span<const Isa> all() { return kIsas; }

std::vector<std::string_view> supported() {
  std::vector<std::string_view> names;
  for (const Isa& isa : kIsas)
    if (isa.supported()) names.push_back(isa.name);
  return names;
}

const Isa& active() {
  static const Isa& isa = choose();
  return isa;
}

}  // namespace quire::cpu
