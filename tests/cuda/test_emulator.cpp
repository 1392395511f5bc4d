// The emulator against the PTX ISA: what operations give, and what is refused.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/emulator/emulator.h"
#include "cuda/emulator/small_floats.h"
#include "quire/format/codec.h"
#include "quire/format/fast.h"
#include "quire/format/half.h"

namespace quire::testing {
namespace {

struct Parameters {
  uint64_t to, a, b, c;
};

/// Variables of the module, and registers beside %rd.
constexpr const char* kVariables =
    ".const .align 4 .b8 table[8] = {1, 0, 0, 0, 255, 255, 255, 127};\n"
    ".global .align 8 .u64 wide[2] = {5, -2};\n.visible .global .f32 real = 0f3F800000;\n";
constexpr const char* kRegisters =
    ".reg .b64 %rd<9>;\n.reg .pred %p<3>;\n.reg .b32 %r<5>;\n.reg .b16 %rs<5>;\n"
    ".shared .align 8 .b8 mine[16];\n.local .align 8 .b8 depot[16];\n";

/// A kernel that computes %rd5 of the parameters a, b and c (%rd2 to %rd4) and stores it.
std::string kernel_of(const std::string& body) {
  return std::string(".version 9.0\n") + kVariables +
         ".visible .entry k(\n.param .u64 k_param_0,\n.param .u64 k_param_1,\n.param .u64 k_param_2,\n"
         ".param .u64 k_param_3\n)\n{\n" +
         kRegisters +
         "ld.param.u64 %rd1, [k_param_0];\n"
         "ld.param.u64 %rd2, [k_param_1];\nld.param.u64 %rd3, [k_param_2];\nld.param.u64 %rd4, [k_param_3];\n" +
         body + "\nret;\n\n}\n";
}

uint64_t result_of(const std::string& body, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
  emulator::HostMemory memory;
  auto* to = reinterpret_cast<uint64_t*>(memory.allocate(sizeof(uint64_t)));
  const Parameters parameters{reinterpret_cast<uint64_t>(to), a, b, c};
  const auto kernels = emulator::parse(kernel_of(body + "\nst.global.u64 [%rd1], %rd5;"));
  emulator::run(kernels.at("k"), {.most_steps = 10'000'000}, &parameters, sizeof parameters, memory);
  return *to;
}

struct Row {
  std::string body;
  uint64_t a, b, c, expected;
};
template <std::size_t kCount>
void expect_all(const Row (&rows)[kCount]) {
  for (const Row& row : rows) EXPECT_EQ(result_of(row.body, row.a, row.b, row.c), row.expected) << row.body;
}

TEST(Emulator, OperationsGiveWhatTheIsaSays) {
  constexpr uint64_t one = 0x3F800000, tiny = 0x33800000 /* 2^-24 */, nan = 0x7FC12345, minus_zero = 0x80000000;
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
  expect_all(rows);
}

TEST(Emulator, OperationsOnBitsGiveWhatTheIsaSays) {
  constexpr uint64_t all = ~uint64_t{0}, a = 0x03020100, b = 0x07060504;
  const Row rows[] = {
      {"add.cc.u32 %rd6, %rd2, %rd3;\naddc.u32 %rd5, %rd4, 0;", 0xFFFFFFFF, 1, 5, 6},
      {"add.cc.u64 %rd6, %rd2, %rd3;\naddc.u64 %rd5, %rd4, 0;", 0xFFFFFFFF, 1, 5, 5},
      {"sub.cc.u32 %rd6, %rd2, %rd3;\nsubc.u32 %rd5, %rd4, 0;", 0, 1, 5, 4},
      {"mad.lo.cc.u32 %rd6, %rd2, %rd3, 1;\nmadc.hi.u32 %rd5, %rd2, %rd3, %rd4;", 0x55555555, 3, 1, 2},
      {"mul.hi.s64 %rd5, %rd2, %rd3;", all, 1, 0, all},
      {"mul.hi.u64 %rd5, %rd2, %rd3;", all, 2, 0, 1},
      {"mad.wide.s32 %rd5, %rd2, %rd3, %rd4;", 0xFFFFFFFF, 3, 10, 7},
      {"sad.u32 %rd5, %rd2, %rd3, %rd4;", 3, 5, 10, 12},
      {"add.sat.s32 %rd5, %rd2, %rd3;", 0x7FFFFFFF, 1, 0, 0x7FFFFFFF},
      {"abs.s32 %rd5, %rd2;", 0xFFFFFFFB, 0, 0, 5},
      {"slct.u64.s32 %rd5, %rd2, %rd3, %rd4;", 1, 2, 0xFFFFFFFF, 2},
      {"prmt.b32 %rd5, %rd2, %rd3, 0x7340;", a, b, 0, 0x07030400},
      {"prmt.b32 %rd5, %rd2, %rd3, 0x0008;", 0x80, 0, 0, 0x808080FF},
      {"prmt.b32.f4e %rd5, %rd2, %rd3, %rd4;", a, b, 1, 0x04030201},
      {"prmt.b32.b4e %rd5, %rd2, %rd3, %rd4;", a, b, 1, 0x06070001},
      {"prmt.b32.rc8 %rd5, %rd2, %rd3, %rd4;", a, b, 2, 0x02020202},
      {"prmt.b32.ecl %rd5, %rd2, %rd3, %rd4;", a, b, 2, 0x03020202},
      {"prmt.b32.ecr %rd5, %rd2, %rd3, %rd4;", a, b, 1, 0x01010100},
      {"prmt.b32.rc16 %rd5, %rd2, %rd3, %rd4;", a, b, 1, 0x03020302},
      {"shf.l.clamp.b32 %rd5, %rd2, %rd3, 40;", 0x11, 0x22, 0, 0x11},
      {"shf.r.clamp.b32 %rd5, %rd2, %rd3, 40;", 0x11, 0x22, 0, 0x22},
      {"shf.l.wrap.b32 %rd5, %rd2, %rd3, 40;", 0x11000000, 0x22, 0, 0x2211},
      {"bfe.u32 %rd5, %rd2, 28, 8;", 0xF0000000, 0, 0, 15},
      {"bfe.s32 %rd5, %rd2, 4, 4;", 0x80, 0, 0, all - 7},
      {"bfe.s32 %rd5, %rd2, 4, 0;", 0xFFFFFFFF, 0, 0, 0},
      {"bfe.s64 %rd5, %rd2, 60, 10;", all << 63, 0, 0, all - 7},
      {"bfind.u32 %rd5, %rd2;", 0x100, 0, 0, 8},
      {"bfind.s32 %rd5, %rd2;", 0xFFFFFFFF, 0, 0, 0xFFFFFFFF},
      {"bfind.shiftamt.u32 %rd5, %rd2;", 0x100, 0, 0, 23},
      {"clz.b64 %rd5, %rd2;", 1, 0, 0, 63},
      {"popc.b64 %rd5, %rd2;", all, 0, 0, 64},
      {"brev.b32 %rd5, %rd2;", 0x13, 0, 0, 0xC8000000},
      {"lop3.b32 %rd5, %rd2, %rd3, %rd4, 0xE8;", 0xC, 0xA, 0x6, 0xE},
      {"dp4a.u32.s32 %rd5, %rd2, %rd3, %rd4;", 0xFF, 0xFF, 300, 45},
      {"mov.b64 {%r1, %r2}, %rd2;\nmov.b64 %rd5, {%r2, %r1};", 0x1122334455667788, 0, 0, 0x5566778811223344},
      {"mov.b64 {%rs1, _, _, %rs2}, %rd2;\nmov.b32 %rd5, {%rs2, %rs1};", 0x1122334455667788, 0, 0, 0x77881122},
  };
  expect_all(rows);
}

TEST(Emulator, ConversionsGiveWhatTheIsaSays) {
  constexpr uint64_t one = 0x3F800000, nan = 0x7FC00000, nan64 = uint64_t{0x7FF8} << 48;
  const auto negative = [](int64_t x) { return static_cast<uint64_t>(x); };
  const Row rows[] = {
      {"cvt.rni.s32.f32 %rd5, %rd2;", 0x40200000 /* 2.5 */, 0, 0, 2},
      {"cvt.rmi.s32.f32 %rd5, %rd2;", 0xBF000000 /* -0.5 */, 0, 0, negative(-1)},
      {"cvt.rpi.s32.f32 %rd5, %rd2;", 0x3DCCCCCD /* 0.1 */, 0, 0, 1},
      {"cvt.rzi.u32.f32 %rd5, %rd2;", nan, 0, 0, 0},
      {"cvt.rzi.u32.f32 %rd5, %rd2;", 0xC0000000 /* -2 */, 0, 0, 0},
      {"cvt.rzi.s64.f32 %rd5, %rd2;", nan, 0, 0, uint64_t{1} << 63},
      {"cvt.rzi.s32.f64 %rd5, %rd2;", nan64, 0, 0, negative(INT32_MIN)},
      {"cvt.rzi.s8.f32 %rd5, %rd2;", 0x43FA0000 /* 500 */, 0, 0, 127},
      {"cvt.rni.f32.f32 %rd5, %rd2;", 0x40600000 /* 3.5 */, 0, 0, 0x40800000},
      {"cvt.sat.u8.s32 %rd5, %rd2;", 300, 0, 0, 255},
      {"cvt.sat.u8.s32 %rd5, %rd2;", 0xFFFFFFFB, 0, 0, 0},
      {"cvt.s8.s32 %rd5, %rd2;", 0x1FF, 0, 0, negative(-1)},
      {"cvt.rz.f32.f64 %rd5, %rd2;", 0x3FF000001FFFFFFF, 0, 0, one},
      {"cvt.rp.f32.f64 %rd5, %rd2;", 0x3FF0000000000001, 0, 0, one + 1},
      {"cvt.rm.f32.s32 %rd5, %rd2;", 0x01000001, 0, 0, 0x4B800000},
      {"cvt.rp.f32.s32 %rd5, %rd2;", 0x01000001, 0, 0, 0x4B800001},
      {"cvt.rn.f32.u64 %rd5, %rd2;", ~uint64_t{0}, 0, 0, 0x5F800000},
      {"cvt.rn.f16.f32 %rd5, %rd2;", 0x33000000 /* 2^-25 */, 0, 0, 0},
      {"cvt.rn.f16.f32 %rd5, %rd2;", 0x33000001, 0, 0, 1},
      {"cvt.rn.f16.f32 %rd5, %rd2;", 0x477FF000 /* 65520 */, 0, 0, 0x7C00},
      {"cvt.rz.f16.f32 %rd5, %rd2;", 0x477FFF00 /* 65535 */, 0, 0, 0x7BFF},
      {"cvt.rn.f16.f32 %rd5, %rd2;", nan, 0, 0, 0x7FFF},
      {"cvt.rn.bf16.f32 %rd5, %rd2;", 0x3F808000, 0, 0, 0x3F80},
      {"cvt.rn.bf16.f32 %rd5, %rd2;", 0x3F818000, 0, 0, 0x3F82},
      {"cvt.rn.bf16.f32 %rd5, %rd2;", 0x7F7FFFFF, 0, 0, 0x7F80},
      {"cvt.f32.f16 %rd5, %rd2;", 0x8001, 0, 0, 0xB3800000 /* -2^-24 */},
      {"cvt.rn.satfinite.e4m3x2.f32 %rd5, %rd2, %rd3;", 0x7F800000, nan, 0, 0x7E7F},
      {"cvt.rn.satfinite.e5m2x2.f32 %rd5, %rd2, %rd3;", 0xFF800000, nan | 0x80000000, 0, 0xFB7F},
      {"cvt.rn.satfinite.e2m1x2.f32 %rd5, %rd2, %rd3;", 0x40200000 /* 2.5 */, 0xC0E00000 /* -7 */, 0, 0x4F},
      {"cvt.rn.satfinite.e2m1x2.f32 %rd5, %rd2, %rd3;", 0x3E800000 /* 0.25 */, 0x3F400000 /* 0.75 */, 0, 0x02},
      {"cvt.rn.f16x2.e5m2x2 %rd5, %rd2;", 0x3C7B, 0, 0, 0x3C007B00},
      {"cvt.rn.f16x2.e2m1x2 %rd5, %rd2;", 0xF1, 0, 0, 0xC6003800},
      {"add.rn.f16x2 %rd5, %rd2, %rd3;", 0x3C007BFF, 0x10007BFF, 0, 0x3C007C00},
      {"fma.rn.bf16x2 %rd5, %rd2, %rd3, %rd4;", 0x3F803F81, 0x40003F81, 0x3F800000, 0x40403F82},
      {"max.NaN.f32 %rd5, %rd2, %rd3;", nan, one, 0, 0x7FFFFFFF},
      {"copysign.f32 %rd5, %rd2, %rd3;", 0x80000000, one, 0, 0xBF800000},
      {"sqrt.rn.f32 %rd5, %rd2;", 0x40000000, 0, 0, 0x3FB504F3},
      {"div.rn.f64 %rd5, %rd2, %rd3;", 0x3FF0000000000000, 0x4008000000000000, 0, 0x3FD5555555555555},
      {"add.rp.f32 %rd5, %rd2, %rd3;", one, 1, 0, one + 1},
      {"testp.subnormal.f32 %p1, %rd2;\nselp.b64 %rd5, 1, 2, %p1;", 1, 0, 0, 1},
  };
  expect_all(rows);
}

TEST(Emulator, ControlAndMemoryDoWhatTheIsaSays) {
  const std::string both =
      "setp.ne.s64 %p1, %rd4, 0;\nsetp.lt.and.u32 %p1|%p2, %rd2, %rd3, %p1;\nselp.b64 %rd5, 1, 0, %p1;\n"
      "selp.b64 %rd6, 2, 0, %p2;\nadd.u64 %rd5, %rd5, %rd6;";
  const std::string indexed =
      "ts: .branchtargets $A, $B,\n $C;\nbrx.idx %rd2, ts;\n$A: mov.u64 %rd5, 10;\nbra $E;\n"
      "$B: mov.u64 %rd5, 20;\nbra.uni $E;\n$C: mov.u64 %rd5, 30;\n$E:";
  const Row rows[] = {
      {both, 1, 2, 1, 1},
      {both, 3, 2, 1, 2},
      {both, 1, 2, 0, 0},
      {"mov.u64 %rd5, 7;\nsetp.lt.s64 %p1, %rd2, 0;\n@!%p1 mov.b64 {%r1, %r2}, %rd2;\n@%p1 mov.u64 %rd5, 9;", 1, 0, 0,
       7},
      {"setp.ge.or.s32 %p1, %rd2, %rd3, !%p2;\nselp.b64 %rd5, 1, 2, %p1;", 5, 5, 0, 1},
      {indexed, 0, 0, 0, 10},
      {indexed, 1, 0, 0, 20},
      {indexed, 2, 0, 0, 30},
      // A scope has registers and labels of its own.
      {"{\n.reg .u64 t;\nadd.u64 t, %rd2, 1;\n{\n.reg .u64 t;\nmov.u64 t, 100;\nbra L;\nL: mov.u64 %rd5, 1;\n}\nbra "
       "L;\n"
       "mov.u64 t, 50;\nL: add.u64 %rd5, t, %rd5;\n}",
       5, 0, 0, 7},
      {"ld.const.u32 %rd5, [table+4];", 0, 0, 0, 0x7FFFFFFF},
      {"mov.u64 %rd6, wide;\nld.global.u64 %rd5, [%rd6+8];", 0, 0, 0, static_cast<uint64_t>(-2)},
      {"ld.global.f32 %rd5, [real];", 0, 0, 0, 0x3F800000},
      {"mov.u64 %rd6, mine;\ncvta.shared.u64 %rd6, %rd6;\nst.u64 [%rd6+8], %rd2;\nld.shared.u64 %rd5, [mine+8];", 3, 0,
       0, 3},
      {"mov.u64 %rd6, depot;\nst.local.u64 [%rd6], %rd2;\ncvta.local.u64 %rd6, %rd6;\nld.u64 %rd5, [%rd6];", 3, 0, 0,
       3},
      {"ld.param.v2.u64 {_, %rd5}, [k_param_0];", 4, 0, 0, 4},
      {"st.global.u64 [%rd1], %rd2;\nred.relaxed.gpu.global.add.u64 [%rd1], %rd3;\nld.volatile.global.u64 %rd5, "
       "[%rd1];",
       4, 5, 0, 9},
      {"st.global.wt.u64 [%rd1], %rd2;\nld.global.nc.L1::no_allocate.L2::128B.u64 %rd5, [%rd1];", 4, 0, 0, 4},
      {"st.global.u32 [%rd1], 9;\natom.global.inc.u32 %rd5, [%rd1], 9;\nld.acquire.sys.global.u32 %rd5, [%rd1];", 0, 0,
       0, 0},
      {"st.shared.u32 [mine], 0;\natom.shared.dec.u32 %rd6, [mine], 9;\nld.shared.u32 %rd5, [mine];", 0, 0, 0, 9},
      {"st.shared.u64 [mine], %rd2;\natom.shared.cas.b64 %rd6, [mine], %rd2, %rd3;\nld.shared.u64 %rd5, [mine];", 4, 5,
       0, 5},
      // Subnormal numbers count in shared memory, and not in global memory.
      {"st.shared.u32 [mine], 1;\natom.shared.add.f32 %rd6, [mine], 0f00000001;\nld.shared.u32 %rd5, [mine];", 0, 0, 0,
       2},
      {"st.global.u32 [%rd1], 1;\natom.global.add.f32 %rd6, [%rd1], 0f00000001;\nld.global.u32 %rd5, [%rd1];", 0, 0, 0,
       0},
  };
  expect_all(rows);
}

TEST(Emulator, WhatIsUnknownOrNotExactOrOutsideOfMemoryIsRefused) {
  const std::pair<const char*, const char*> refused[] = {
      {"add.f32 %rd5, %rd2, %rd3;", "fused"},
      {"fma.rn.ftz.f32 %rd5, %rd2, %rd3, %rd4;", "subnormal"},
      {"div.approx.f32 %rd5, %rd2, %rd3;", "not exact"},
      {"ex2.approx.ftz.f32 %rd5, %rd2;", "not exact"},
      {"trap;", "a trap"},
      {"tanh.of.all %rd5;", "does not know"},
      {"mov.u64 %rd5, kTable;", "does not know: kTable"},
      {"mov.u32 %rd5, %clock;", "%clock"},
      {"mov.u32 %rd5, %warpid;", "%warpid"},
      {"mov.u32 %rd5, %undeclared7;", "%undeclared7"},
      {"bra $L__missing;", "no label"},
      {"brx.idx %rd2, ts;\nts: .branchtargets $A;\n$A:\nbrx.idx 1, ts;", "an index beyond"},
      {"call (%rd5), _Znwm, (%rd2);", "no parameter"},
      {"call vprintf;", "does not have"},
      {"ld.global.u32 %rd5, [%rd2];", "outside of the device's memory"},
      {"ld.global.u32 %rd5, [%rd1+8];", "outside of the device's memory"},
      {"ld.global.u32 %rd5, [%rd1+2];", "not aligned"},
      {"st.global.v2.u64 [%rd1], {%rd2, %rd3};", "outside of the device's memory"},
      {"st.global.u64 [wide], %rd2;", "keeps constant"},
      {"ld.shared.u32 %rd5, [%rd2];", "outside of the 16 bytes of shared memory"},
      {"cvta.to.shared.u64 %rd5, %rd1;", "not in the space"},
      {"ld.local.u64 %rd5, [%rd2+16];", "outside of local memory"},
      {"ld.param.u64 %rd5, [k_param_3+8];", "outside of the parameters"},
      {"div.s32 %rd5, %rd2, %rd3;", "by 0"},
      {"$L: bra $L;", "does not end"},
  };
  for (const auto& [body, text] : refused) try {
      result_of(body, 0);
      ADD_FAILURE() << body;
    } catch (const emulator::Error& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << body << ": " << e.what();
    }
}

/// The emulator has its own rule, written from the text of PTX. A GPU's instructions gave the core's code for every
/// float32.
template <Format kFormat, const emulator::SmallFormat& kSmall>
void expect_codes_of_the_core() {
  std::vector<float> points{NAN, -NAN, INFINITY, -INFINITY};
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    points.push_back(f16_to_f32(static_cast<uint16_t>(bits)));
    points.push_back(bf16_to_f32(static_cast<uint16_t>(bits)));
  }
  for (int code = 0; code < row(kFormat).max_code(); ++code) {
    const float low = decode(kFormat, code), high = decode(kFormat, code + 1), middle = low + (high - low) / 2;
    for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, high)})
      points.insert(points.end(), {x, -x});
  }
  for (const float x : points) {
    const auto expected = static_cast<uint32_t>(encode(kFormat, x));
    ASSERT_EQ(emulator::encode_small<kSmall>(static_cast<double>(x)), expected) << x;
    ASSERT_EQ(encode_fast<kFormat>(x), expected) << x;
  }
}

TEST(Emulator, GivesEveryNumberOf16BitsAndEachHalfwayPointTheCodeOfTheCore) {
  expect_codes_of_the_core<Format::e4m3, emulator::kE4m3>();
  expect_codes_of_the_core<Format::e5m2, emulator::kE5m2>();
  expect_codes_of_the_core<Format::e2m1, emulator::kE2m1>();
}

}  // namespace
}  // namespace quire::testing
