#include "cuda/emulator/block.h"
#include "cuda/emulator/operations.h"

namespace quire::emulator {
namespace {

const Instruction* branch(Thread&, const Instruction& i) { return &i + i.target; }
template <bool kIf>
const Instruction* branch_on(Thread& t, const Instruction& i) {
  return &i + ((t.bits(i.at[0]) != 0) == kIf ? i.target : 1);
}
const Instruction* branch_by_index(Thread& t, const Instruction& i) {
  const std::vector<int>& table = t.function().tables[static_cast<std::size_t>(i.target)];
  const auto n = t.read<uint32_t>(i.at[0]);
  if (n >= table.size()) throw Error("an index beyond the " + std::to_string(table.size()) + " targets of a branch");
  return &i + table[n];
}
const Instruction* call(Thread& t, const Instruction& i) { return t.call(i); }
const Instruction* leave(Thread& t, const Instruction&) { return t.leave(); }
const Instruction* end(Thread& t, const Instruction&) {
  t.block().end(t);
  return nullptr;
}
/// What the parser makes of an instruction that it does not know.
const Instruction* refuse(Thread& t, const Instruction& i) {
  throw Error(t.function().refusals[static_cast<std::size_t>(i.target)]);
}
const Instruction* nothing(Thread&, const Instruction& i) { return &i + 1; }

/// operands: the barrier, perhaps a number of threads, perhaps a predicate.
Block::Arrival arrival(const Thread& t, const Instruction& i, std::size_t first, bool has_predicate) {
  const auto operands = static_cast<std::size_t>(i.values) - first - (has_predicate ? 1 : 0);
  Block::Arrival a{};
  a.barrier = t.read<uint32_t>(i.at[first]);
  a.count = operands > 1 ? t.read<uint32_t>(i.at[first + 1]) : 0;
  if (operands > 1 && a.count == 0) throw Error("a barrier for 0 threads");
  a.waits = true;
  a.yes = has_predicate && t.bits(i.at[first + operands]) != 0;
  return a;
}
const Instruction* wait(Thread& t, const Instruction& i) { return t.block().arrive(t, i, arrival(t, i, 0, false)); }
const Instruction* arrive(Thread& t, const Instruction& i) {
  Block::Arrival a = arrival(t, i, 0, false);
  a.waits = false;
  return t.block().arrive(t, i, a);
}
template <uint32_t (*kResult)(Votes)>
const Instruction* reduce(Thread& t, const Instruction& i) {
  Block::Arrival a = arrival(t, i, 1, true);
  a.finish = [](Thread& waited, const Instruction& in, Votes v) { waited.set(in.at[0], kResult(v)); };
  return t.block().arrive(t, i, a);
}
uint32_t how_many(Votes v) { return v.yes; }
uint32_t all_of(Votes v) { return v.yes == v.all; }
uint32_t any_of(Votes v) { return v.yes > 0; }

// Special registers.
uint64_t lane(const Thread& t) { return t.index % kWarp; }
template <class T>
using Getter = T (*)(const Thread&);
template <Dim3 (*kDim)(const Thread&), unsigned Dim3::* kAxis>
uint64_t axis(const Thread& t) {
  return kDim(t).*kAxis;
}
Dim3 of_thread(const Thread& t) { return t.place; }
Dim3 of_block(const Thread& t) { return t.block().index; }
Dim3 block_size(const Thread& t) { return t.block().launch.block; }
Dim3 grid_size(const Thread& t) { return t.block().launch.grid; }

template <Dim3 (*kDim)(const Thread&)>
void add_axes(std::map<std::string, Getter<uint64_t>>& all, const std::string& name) {
  all[name + ".x"] = axis<kDim, &Dim3::x>;
  all[name + ".y"] = axis<kDim, &Dim3::y>;
  all[name + ".z"] = axis<kDim, &Dim3::z>;
}

std::map<std::string, Getter<uint64_t>> specials() {
  std::map<std::string, Getter<uint64_t>> all;
  add_axes<of_thread>(all, "%tid");
  add_axes<of_block>(all, "%ctaid");
  add_axes<block_size>(all, "%ntid");
  add_axes<grid_size>(all, "%nctaid");
  all["%laneid"] = lane;
  all["%lanemask_eq"] = [](const Thread& t) { return uint64_t{1} << lane(t); };
  all["%lanemask_lt"] = [](const Thread& t) { return (uint64_t{1} << lane(t)) - 1; };
  all["%lanemask_le"] = [](const Thread& t) { return (uint64_t{2} << lane(t)) - 1; };
  all["%lanemask_ge"] = [](const Thread& t) { return uint64_t{0xFFFFFFFF} & ~((uint64_t{1} << lane(t)) - 1); };
  all["%lanemask_gt"] = [](const Thread& t) { return uint64_t{0xFFFFFFFF} & ~((uint64_t{2} << lane(t)) - 1); };
  all["%dynamic_smem_size"] = [](const Thread& t) { return uint64_t{t.block().launch.shared_bytes}; };
  // Not of PTX: where the parser puts the memory of arrays.
  all["%local_base"] = [](const Thread& t) { return t.local_base(); };
  all["%dynamic_shared"] = [](const Thread& t) { return uint64_t{kSharedBegin + t.block().program.shared_bytes()}; };
  return all;
}

}  // namespace

uint64_t (*special_register(const std::string& name))(const Thread&) {
  static const std::map<std::string, Getter<uint64_t>> all = specials();
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

void add_control(Table& table) {
  table["bra"] = table["bra.uni"] = branch;
  // The parser's names of branches under a predicate, which lead around other instructions too.
  table["bra.if"] = branch_on<true>;
  table["bra.unless"] = branch_on<false>;
  table["brx.idx"] = table["brx.idx.uni"] = branch_by_index;
  table["call"] = table["call.uni"] = call;
  table["ret"] = table["ret.uni"] = leave;
  table["exit"] = end;
  table["refuse"] = refuse;
  table["bar.sync"] = wait;
  table["bar.arrive"] = arrive;
  table["bar.red.popc.u32"] = reduce<how_many>;
  table["bar.red.and.pred"] = reduce<all_of>;
  table["bar.red.or.pred"] = reduce<any_of>;
  // Threads run one at a time: each sees what another one has written before.
  for (const char* name : {"membar", "fence", "nanosleep", "prefetch", "griddepcontrol"}) table[name] = nothing;
}

}  // namespace quire::emulator
