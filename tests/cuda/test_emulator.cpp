// The emulator against the PTX ISA: what operations give, and what is refused.
#include <gtest/gtest.h>

#include "cuda/emulator/emulator.h"

namespace quire::testing {
namespace {

struct Parameters {
  uint64_t to, a, b, c;
};

/// A kernel that computes %rd5 of the parameters a, b and c (%rd2 to %rd4) and stores it.
std::string kernel_of(const std::string& body) {
  return ".version 9.0\n.visible .entry k(\n.param .u64 k_param_0,\n.param .u64 k_param_1,\n.param .u64 k_param_2,\n"
         ".param .u64 k_param_3\n)\n{\n.reg .b64 %rd<9>;\n.reg .pred %p<3>;\nld.param.u64 %rd1, [k_param_0];\n"
         "ld.param.u64 %rd2, [k_param_1];\nld.param.u64 %rd3, [k_param_2];\nld.param.u64 %rd4, [k_param_3];\n" +
         body + "\nret;\n\n}\n";
}

uint64_t result_of(const std::string& body, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
  emulator::HostMemory memory;
  auto* to = reinterpret_cast<uint64_t*>(memory.allocate(sizeof(uint64_t)));
  const Parameters parameters{reinterpret_cast<uint64_t>(to), a, b, c};
  const auto kernels = emulator::parse(kernel_of(body + "\nst.global.u64 [%rd1], %rd5;"));
  emulator::run(kernels.at("k"), {}, &parameters, sizeof parameters, memory);
  return *to;
}

TEST(Emulator, OperationsGiveWhatTheIsaSays) {
  constexpr uint64_t one = 0x3F800000, tiny = 0x33800000 /* 2^-24 */, nan = 0x7FC12345, minus_zero = 0x80000000;
  struct Row {
    const char* body;
    uint64_t a, b, c, expected;
  };
  const Row rows[] = {
      {"add.s32 %rd5, %rd2, %rd3;", 0xFFFFFFFF, 2, 0, 1},
      {"mul.lo.s64 %rd5, %rd2, -3;", 5, 0, 0, static_cast<uint64_t>(-15)},
      {"mul.wide.s32 %rd5, %rd2, %rd3;", 0xFFFFFFFE, 3, 0, static_cast<uint64_t>(-6)},
      {"mul.wide.u32 %rd5, %rd2, %rd3;", 0xFFFFFFFE, 3, 0, 0x2FFFFFFFA},
      {"mad.lo.s32 %rd5, %rd2, %rd3, %rd4;", 0x10000, 0x10000, 7, 7},
      {"div.s64 %rd5, %rd2, %rd3;", static_cast<uint64_t>(-7), 2, 0, static_cast<uint64_t>(-3)},
      {"rem.u32 %rd5, %rd2, %rd3;", 0xFFFFFFFF, 10, 0, 5},
      {"shr.s32 %rd5, %rd2, 40;", 0x80000000, 0, 0, static_cast<uint64_t>(int64_t{-1})},
      {"shr.u64 %rd5, %rd2, 60;", 0xF000000000000000, 0, 0, 15},
      {"shl.b32 %rd5, %rd2, 32;", 1, 0, 0, 0},
      {"bfi.b32 %rd5, %rd2, %rd3, 4, 28;", 0xABC, 0xF, 0, 0xABCF},
      {"cvt.u32.u16 %rd5, %rd2;", 0x12345678, 0, 0, 0x5678},
      {"cvt.s64.s32 %rd5, %rd2;", 0xFFFFFFFF, 0, 0, static_cast<uint64_t>(int64_t{-1})},
      {"setp.lt.s32 %p1, %rd2, %rd3;\nselp.b64 %rd5, 1, 2, %p1;", 0xFFFFFFFF, 0, 0, 1},
      {"setp.lt.u32 %p1, %rd2, %rd3;\nselp.b64 %rd5, 1, 2, %p1;", 0xFFFFFFFF, 0, 0, 2},
      {"mov.u64 %rd5, 1;\nsetp.eq.s32 %p1, %rd2, 0;\n@!%p1 bra $L;\nmov.u64 %rd5, 2;\n$L:", 0, 0, 0, 2},
      // Rounded to nearest even; NaN is 0x7FFFFFFF.
      {"add.rn.f32 %rd5, %rd2, %rd3;", one, tiny, 0, one},
      {"add.rn.f32 %rd5, %rd2, %rd3;", one + 1, tiny, 0, one + 2},
      {"mul.rn.f32 %rd5, %rd2, 0f00000001;", 0x3F000000, 0, 0, 0},
      {"rcp.rn.f32 %rd5, %rd2;", 0x40400000, 0, 0, 0x3EAAAAAB},
      {"add.rn.f32 %rd5, %rd2, %rd3;", nan, one, 0, 0x7FFFFFFF},
      {"mov.f32 %rd5, %rd2;", nan, 0, 0, nan},
      {"neg.f32 %rd5, %rd2;", nan, 0, 0, nan | minus_zero},
      {"min.f32 %rd5, %rd2, %rd3;", nan, one, 0, one},
      {"min.f32 %rd5, %rd2, %rd3;", 0, minus_zero, 0, minus_zero},
      {"max.f32 %rd5, %rd2, %rd3;", minus_zero, 0, 0, 0},
      {"setp.leu.f32 %p1, %rd2, %rd3;\nselp.b64 %rd5, 1, 2, %p1;", nan, one, 0, 1},
      {"setp.le.f32 %p1, %rd2, %rd3;\nselp.b64 %rd5, 1, 2, %p1;", nan, one, 0, 2},
      {"setp.neu.f64 %p1, %rd2, %rd3;\nselp.b64 %rd5, 1, 2, %p1;", 0, 0, 0, 2},
      {"cvt.rzi.s32.f32 %rd5, %rd2;", 0x4F800000 /* 2^32 */, 0, 0, 0x7FFFFFFF},
      {"cvt.rn.f32.f64 %rd5, %rd2;", 0x3FF0000010000000 /* 1 + 2^-24 */, 0, 0, one},
      {"cvt.f64.f32 %rd5, %rd2;", one, 0, 0, 0x3FF0000000000000},
  };
  for (const Row& row : rows) EXPECT_EQ(result_of(row.body, row.a, row.b, row.c), row.expected) << row.body;
}

TEST(Emulator, WhatIsUnknownOrNotExactOrOutsideOfMemoryIsRefused) {
  const char* bodies[] = {
      "add.f32 %rd5, %rd2, %rd3;",               // may be contracted
      "div.approx.f32 %rd5, %rd2, %rd3;",        // not exact
      "trap;",                                   // and what nvcc makes of a read from null
      "mov.u64 %rd5, kTable;",                   // a variable
      "bra $L__missing;",                        // no label
      "ld.global.u32 %rd5, [%rd2];",             // null
      "ld.global.u32 %rd5, [%rd1+8];",           // behind the end
      "ld.global.u32 %rd5, [%rd1+2];",           // not aligned
      "st.global.v2.u64 [%rd1], {%rd2, %rd3};",  // partly behind the end
      "div.s32 %rd5, %rd2, %rd3;",               // by 0
  };
  for (const char* body : bodies) EXPECT_THROW(result_of(body, 0), emulator::Error) << body;
}

}  // namespace
}  // namespace quire::testing
