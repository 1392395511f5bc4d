// Words of the tensor cores, and asynchronous copies. Layouts as in the PTX ISA 9.0, 9.7.14 and 9.7.9.25; hardware has
// confirmed them on integers.
#include <algorithm>
#include <cmath>

#include "cuda/emulator/block.h"
#include "cuda/emulator/operations.h"
#include "cuda/emulator/small_floats.h"

namespace quire::emulator {
namespace {

/// A register that an instruction with more than ten operands names.
int named(const Thread& t, const Instruction& i, int n) {
  return t.function().operands[static_cast<std::size_t>(i.target + n)];
}

template <Word kWord>
const Instruction* of_whole_warp(Thread& t, const Instruction& i) {
  return t.block().meet(t, i, kWord, 0xFFFFFFFF);
}
void check_whole(const Lanes& lanes) {
  if (lanes.mask != 0xFFFFFFFF) throw Error("a word of a whole warp, of which some lanes have ended or do not exist");
}

/// x without its bits below `unit`, which is a power of two.
double cut_off(double x, double unit) { return std::trunc(x / unit) * unit; }

/// c and so many products, as a tensor core adds them that keeps no more than it must: terms are aligned to the largest
/// one, with the 24 bits of a float32, and what is below is cut off, as it is of the sum. Chips differ, and keep a few
/// bits more (of codes of 8 bits: ten fewer), so only what is exact is the same there.
template <unsigned kTerms>
float aligned_sum(const std::array<double, kTerms>& products, float c) {
  double largest = std::fabs(static_cast<double>(c)), plain = static_cast<double>(c);
  for (const double x : products) largest = std::max(largest, std::fabs(x)), plain += x;
  if (!std::isfinite(plain) || largest == 0) return static_cast<float>(plain);
  const double unit = std::ldexp(1.0, std::max(std::ilogb(largest) - 23, -149));
  double sum = cut_off(static_cast<double>(c), unit);
  for (const double x : products) sum += cut_off(x, unit);
  if (sum == 0) return 0;
  return static_cast<float>(cut_off(sum, std::ldexp(1.0, std::max(std::ilogb(sum) - 23, -149))));
}

/// d = a b + c for a of 16 rows and b of 8 columns, kBits of each of their numbers. Operands: four of d, four of a, two
/// of b, four of c. Half of the products are added first, as sm_80 does.
template <int kBits, float (*kA)(uint32_t), float (*kB)(uint32_t)>
void multiply(const Lanes& lanes) {
  check_whole(lanes);
  constexpr unsigned each = 32 / kBits, depth = 256 / kBits;
  constexpr uint32_t mask = (1u << kBits) - 1;
  std::array<std::array<double, depth>, 16> a{};
  std::array<std::array<double, depth>, 8> b{};
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) {
    const unsigned group = lane / 4, first = lane % 4 * each;
    const auto code = [&](int n, unsigned e) { return t.read<uint32_t>(named(t, i, n)) >> (kBits * e) & mask; };
    for (unsigned e = 0; e < each; ++e) {
      for (unsigned r = 0; r < 4; ++r)
        a[group + r % 2 * 8][first + e + r / 2 * (depth / 2)] = kA(code(4 + static_cast<int>(r), e));
      for (unsigned r = 0; r < 2; ++r) b[group][first + e + r * (depth / 2)] = kB(code(8 + static_cast<int>(r), e));
    }
  });
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) {
    std::array<float, 4> results{};
    for (unsigned r = 0; r < 4; ++r) {
      results[r] = t.read<float>(named(t, i, 10 + static_cast<int>(r)));
      for (unsigned half = 0; half < depth; half += depth / 2) {
        std::array<double, depth / 2> products;
        for (unsigned k = 0; k < depth / 2; ++k)
          products[k] = a[lane / 4 + r / 2 * 8][half + k] * b[lane % 4 * 2 + r % 2][half + k];
        results[r] = aligned_sum<depth / 2>(products, results[r]);
      }
    }
    for (unsigned r = 0; r < 4; ++r) t.write<float>(named(t, i, static_cast<int>(r)), results[r]);
  });
}

/// kCount matrices of 8 rows of 16 bytes; lane 8 m + r has the address of row r of matrix m.
template <unsigned kCount, bool kTransposed>
void load_matrices(const Lanes& lanes) {
  check_whole(lanes);
  std::array<const std::byte*, kWarp> rows{};
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) {
    if (lane < 8 * kCount) rows[lane] = t.address(Space::shared, i, i.at[kCount], 16, Touch::read);
  });
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) {
    for (unsigned m = 0; m < kCount; ++m) {
      std::array<uint16_t, 2> pair{};
      for (unsigned e = 0; e < 2; ++e) {
        const unsigned long_way = lane / 4, short_way = lane % 4 * 2 + e;
        const unsigned row = kTransposed ? short_way : long_way, column = kTransposed ? long_way : short_way;
        std::memcpy(&pair[e], rows[8 * m + row] + 2 * column, 2);
      }
      t.set(i.at[m], uint32_t{pair[1]} << 16 | pair[0]);
    }
  });
}

/// Operands: to, from, bytes, and perhaps how many of them come from memory: the rest are 0. It ends as late as it may.
template <bool kOnly16>
const Instruction* copy(Thread& t, const Instruction& i) {
  const std::size_t bytes = t.bits(i.at[2]), valid = i.values > 3 ? t.read<uint32_t>(i.at[3]) : bytes;
  if ((bytes != 4 && bytes != 8 && bytes != 16) || (kOnly16 && bytes != 16) || valid > bytes)
    throw Error("an asynchronous copy of " + std::to_string(valid) + " of " + std::to_string(bytes) + " bytes");
  if ((t.bits(i.at[0]) | t.bits(i.at[1])) & (bytes - 1)) throw Error("an address that is not aligned");
  const uint64_t to = t.read<uint32_t>(i.at[0]);
  t.block().shared.begin_copy(to, bytes, t.index);
  const auto* from = reinterpret_cast<const std::byte*>(t.bits(i.at[1]));
  const std::byte* host = valid ? t.block().memory.translate(from, valid, false) : nullptr;
  if (valid && !host) throw Error("an address outside of the device's memory");
  t.copies.back().push_back({to, host, valid, bytes});
  return &i + 1;
}

void finish_first(Thread& t, std::size_t groups) {
  for (std::size_t g = 0; g < groups; ++g)
    for (const Thread::Copy& c : t.copies[g]) {
      std::byte* to = t.block().shared.end_copy(c.to, c.bytes, t.index);
      std::memset(to, 0, c.bytes);
      if (c.valid) std::memcpy(to, c.from, c.valid);
    }
  t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(groups));
}
const Instruction* commit(Thread& t, const Instruction& i) {
  t.copies.emplace_back();
  return &i + 1;
}
const Instruction* wait_group(Thread& t, const Instruction& i) {
  const std::size_t committed = t.copies.size() - 1, left = t.bits(i.at[0]);
  finish_first(t, committed - std::min(committed, left));
  return &i + 1;
}
const Instruction* wait_all(Thread& t, const Instruction& i) {
  commit(t, i);
  finish_first(t, t.copies.size() - 1);
  return &i + 1;
}

template <float (*kA)(uint32_t)>
void add_products_of_codes(Table& table, const std::string& a) {
  const std::string name = "mma.sync.aligned.m16n8k32.row.col.f32.";
  table[name + a + ".e4m3.f32"] = of_whole_warp<multiply<8, kA, e4m3_value>>;
  table[name + a + ".e5m2.f32"] = of_whole_warp<multiply<8, kA, e5m2_value>>;
}

template <unsigned kCount>
void add_matrices(Table& table) {
  const std::string name = "ldmatrix.sync.aligned.m8n8.x" + std::to_string(kCount);
  table[name + ".shared.b16"] = of_whole_warp<load_matrices<kCount, false>>;
  table[name + ".trans.shared.b16"] = of_whole_warp<load_matrices<kCount, true>>;
}

}  // namespace

void add_tensor_words(Table& table) {
  table["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = of_whole_warp<multiply<16, bf16_value, bf16_value>>;
  table["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] = of_whole_warp<multiply<16, f16_value, f16_value>>;
  add_products_of_codes<e4m3_value>(table, "e4m3");
  add_products_of_codes<e5m2_value>(table, "e5m2");
  add_matrices<1>(table);
  add_matrices<2>(table);
  add_matrices<4>(table);
  table["cp.async.ca.shared.global"] = copy<false>;
  table["cp.async.cg.shared.global"] = copy<true>;
  table["cp.async.commit_group"] = commit;
  table["cp.async.wait_group"] = wait_group;
  table["cp.async.wait_all"] = wait_all;
}

}  // namespace quire::emulator
