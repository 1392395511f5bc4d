// Words that the lanes of a warp execute together.
#include <algorithm>
#include <bit>

#include "cuda/emulator/block.h"
#include "cuda/emulator/operations.h"

namespace quire::emulator {
namespace {

/// The mask is operand kMask.
template <Word kWord, std::size_t kMask>
const Instruction* word(Thread& t, const Instruction& i) {
  return t.block().meet(t, i, kWord, t.read<uint32_t>(i.at[kMask]));
}

enum class Shuffle { up, down, butterfly, index };

/// Operands: the result, whether its lane is in range, the value, the lane, the clamp and the mask of segments.
template <Shuffle kMode>
void shuffle(const Lanes& lanes) {
  constexpr uint32_t kNothing = 0xDEADBEEF;  // of a lane that takes no part
  std::array<uint32_t, kWarp> values{};
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) { values[lane] = t.read<uint32_t>(i.at[2]); });
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) {
    const auto by = static_cast<unsigned>(t.bits(i.at[3]) & 31), clamp = static_cast<unsigned>(t.bits(i.at[4]) & 31);
    const auto segment = static_cast<unsigned>(t.bits(i.at[4]) >> 8 & 31);
    const unsigned first = lane & segment, last = first | (clamp & ~segment & 31);
    // Below 0 it is large, so not in range.
    unsigned from = lane;
    bool in_range = false;
    switch (kMode) {
      case Shuffle::up:
        from = lane - by;
        in_range = static_cast<int>(from) >= static_cast<int>(last);
        break;
      case Shuffle::down:
        from = lane + by;
        in_range = from <= last;
        break;
      case Shuffle::butterfly:
        from = lane ^ by;
        in_range = from <= last;
        break;
      case Shuffle::index:
        from = first | (by & ~segment);
        in_range = from <= last;
        break;
    }
    if (!in_range) from = lane;
    t.set(i.at[0], lanes.has(from) ? values[from] : kNothing);
    t.set(i.at[1], in_range);
  });
}

/// The lanes whose operand 1 is true.
uint32_t ballot_of(const Lanes& lanes) {
  uint32_t yes = 0;
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) { yes |= uint32_t{t.bits(i.at[1]) != 0} << lane; });
  return yes;
}
template <uint32_t (*kResult)(uint32_t yes, uint32_t all)>
void vote(const Lanes& lanes) {
  const uint32_t result = kResult(ballot_of(lanes), lanes.mask);
  lanes.each([&](unsigned, Thread& t, const Instruction& i) { t.set(i.at[0], result); });
}
uint32_t ballot(uint32_t yes, uint32_t) { return yes; }
uint32_t all_of(uint32_t yes, uint32_t all) { return yes == all; }
uint32_t any_of(uint32_t yes, uint32_t) { return yes != 0; }
uint32_t same_of(uint32_t yes, uint32_t all) { return yes == all || yes == 0; }

template <class T>
void match_any(const Lanes& lanes) {
  lanes.each([&](unsigned, Thread& t, const Instruction& i) {
    uint32_t same = 0;
    const T mine = t.read<T>(i.at[1]);
    lanes.each([&](unsigned other, Thread& u, const Instruction& j) {
      same |= uint32_t{u.read<T>(j.at[1]) == mine} << other;
    });
    t.set(i.at[0], same);
  });
}
/// Operands: the mask of all lanes or 0, whether all are the same, the value.
template <class T>
void match_all(const Lanes& lanes) {
  bool same = true, is_first = true;
  T first{};
  lanes.each([&](unsigned, Thread& t, const Instruction& i) {
    if (is_first) first = t.read<T>(i.at[2]);
    is_first = false;
    same = same && t.read<T>(i.at[2]) == first;
  });
  lanes.each([&](unsigned, Thread& t, const Instruction& i) {
    t.set(i.at[0], same ? lanes.mask : 0);
    t.set(i.at[1], same);
  });
}

template <class T, T (*kFunction)(T, T)>
void reduce(const Lanes& lanes) {
  bool is_first = true;
  T result{};
  lanes.each([&](unsigned, Thread& t, const Instruction& i) {
    const T mine = t.read<T>(i.at[1]);
    result = is_first ? mine : kFunction(result, mine);
    is_first = false;
  });
  lanes.each([&](unsigned, Thread& t, const Instruction& i) { t.write<T>(i.at[0], result); });
}
uint32_t sum(uint32_t a, uint32_t b) { return a + b; }
template <class T>
T least(T a, T b) {
  return std::min(a, b);
}
template <class T>
T most(T a, T b) {
  return std::max(a, b);
}
uint32_t both(uint32_t a, uint32_t b) { return a & b; }
uint32_t either(uint32_t a, uint32_t b) { return a | b; }
uint32_t differing(uint32_t a, uint32_t b) { return a ^ b; }

/// What each lane did before comes before what all of them do after.
void synchronise(const Lanes& lanes) {
  Clock seen;
  lanes.each([&](unsigned, Thread& t, const Instruction&) { t.block().shared.release(t.index, seen); });
  lanes.each([&](unsigned, Thread& t, const Instruction&) { t.block().shared.acquire(t.index, seen); });
}

/// Operands: the lane that is elected, and whether it is this one.
void elect(const Lanes& lanes) {
  const auto leader = static_cast<unsigned>(std::countr_zero(lanes.mask));
  lanes.each([&](unsigned lane, Thread& t, const Instruction& i) {
    t.set(i.at[0], leader);
    t.set(i.at[1], lane == leader);
  });
}

/// Which lanes run with this one is not defined, but for the lane itself.
const Instruction* active(Thread& t, const Instruction& i) {
  t.set(i.at[0], uint64_t{1} << t.index % kWarp);
  return &i + 1;
}

}  // namespace

void add_warp_words(Table& table) {
  table["shfl.sync.up.b32"] = word<shuffle<Shuffle::up>, 5>;
  table["shfl.sync.down.b32"] = word<shuffle<Shuffle::down>, 5>;
  table["shfl.sync.bfly.b32"] = word<shuffle<Shuffle::butterfly>, 5>;
  table["shfl.sync.idx.b32"] = word<shuffle<Shuffle::index>, 5>;
  table["vote.sync.ballot.b32"] = word<vote<ballot>, 2>;
  table["vote.sync.all.pred"] = word<vote<all_of>, 2>;
  table["vote.sync.any.pred"] = word<vote<any_of>, 2>;
  table["vote.sync.uni.pred"] = word<vote<same_of>, 2>;
  table["match.any.sync.b32"] = word<match_any<uint32_t>, 2>;
  table["match.any.sync.b64"] = word<match_any<uint64_t>, 2>;
  table["match.all.sync.b32"] = word<match_all<uint32_t>, 3>;
  table["match.all.sync.b64"] = word<match_all<uint64_t>, 3>;
  table["redux.sync.add.u32"] = table["redux.sync.add.s32"] = word<reduce<uint32_t, sum>, 2>;
  table["redux.sync.min.u32"] = word<reduce<uint32_t, least<uint32_t>>, 2>;
  table["redux.sync.max.u32"] = word<reduce<uint32_t, most<uint32_t>>, 2>;
  table["redux.sync.min.s32"] = word<reduce<int32_t, least<int32_t>>, 2>;
  table["redux.sync.max.s32"] = word<reduce<int32_t, most<int32_t>>, 2>;
  table["redux.sync.and.b32"] = word<reduce<uint32_t, both>, 2>;
  table["redux.sync.or.b32"] = word<reduce<uint32_t, either>, 2>;
  table["redux.sync.xor.b32"] = word<reduce<uint32_t, differing>, 2>;
  table["bar.warp.sync"] = word<synchronise, 0>;
  table["elect.sync"] = word<elect, 2>;
  table["activemask.b32"] = active;
}

}  // namespace quire::emulator
