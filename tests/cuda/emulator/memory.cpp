#include "cuda/emulator/operations.h"
#include "cuda/emulator/shared_memory.h"

namespace quire::emulator {
namespace {

template <class T>
void load_from(Thread& t, const Instruction& i, const std::byte* from) {
  for (std::size_t n = 0; n < static_cast<std::size_t>(i.values); ++n) {
    T value;
    std::memcpy(&value, from + n * sizeof(T), sizeof(T));
    t.set(i.at[n], static_cast<uint64_t>(value));
  }
}
template <class T>
void store_to(Thread& t, const Instruction& i, std::byte* to) {
  for (std::size_t n = 0; n < static_cast<std::size_t>(i.values); ++n) {
    const T value = t.read<T>(i.at[n]);
    std::memcpy(to + n * sizeof(T), &value, sizeof(T));
  }
}

template <class T, Space kSpace>
const Instruction* load(Thread& t, const Instruction& i) {
  const auto count = static_cast<std::size_t>(i.values);
  load_from<T>(t, i, t.address(kSpace, i, i.at[count], count * sizeof(T), Touch::read));
  return &i + 1;
}
template <class T, Space kSpace>
const Instruction* store(Thread& t, const Instruction& i) {
  const auto count = static_cast<std::size_t>(i.values);
  store_to<T>(t, i, t.address(kSpace, i, i.at[count], count * sizeof(T), Touch::write));
  return &i + 1;
}

template <class T>
const Instruction* load_parameter(Thread& t, const Instruction& i) {
  const auto count = static_cast<std::size_t>(i.values);
  load_from<T>(t, i, t.area(i, i.at[count], count * sizeof(T)));
  return &i + 1;
}
template <class T>
const Instruction* store_parameter(Thread& t, const Instruction& i) {
  const auto count = static_cast<std::size_t>(i.values);
  store_to<T>(t, i, t.area(i, i.at[count], count * sizeof(T)));
  return &i + 1;
}

template <class T, Space kSpace>
void add_space(Table& table, const std::string& space, const std::string& type) {
  table["ld." + space + type] = load<T, kSpace>;
  if (kSpace != Space::constants) table["st." + space + type] = store<T, kSpace>;
}

template <class T>
void add_type(Table& table, const std::string& type) {
  add_space<T, Space::generic>(table, "", type);
  add_space<T, Space::global>(table, "global.", type);
  add_space<T, Space::shared>(table, "shared.", type);
  add_space<T, Space::local>(table, "local.", type);
  add_space<T, Space::constants>(table, "const.", type);
  table["ld.param." + type] = load_parameter<T>;
  table["st.param." + type] = store_parameter<T>;
}

/// From an address of a space to a generic one, and back.
template <uint64_t kSpace>
const Instruction* to_generic(Thread& t, const Instruction& i) {
  t.set(i.at[0], kSpace | t.read<uint32_t>(i.at[1]));
  return &i + 1;
}
template <uint64_t kSpace>
const Instruction* from_generic(Thread& t, const Instruction& i) {
  const uint64_t at = t.bits(i.at[1]);
  if ((at & kSpaceMask) != kSpace) throw Error("a generic address that is not in the space that it is said to be in");
  t.set(i.at[0], at & ~kSpaceMask);
  return &i + 1;
}
const Instruction* same_address(Thread& t, const Instruction& i) {
  t.set(i.at[0], t.bits(i.at[1]));
  return &i + 1;
}
template <uint64_t kSpace>
const Instruction* is_in_space(Thread& t, const Instruction& i) {
  t.set(i.at[0], (t.bits(i.at[1]) & kSpaceMask) == kSpace);
  return &i + 1;
}

void add_addresses(Table& table) {
  for (const char* name : {"global", "const"})
    table[std::string("cvta.") + name + ".u64"] = table[std::string("cvta.to.") + name + ".u64"] = same_address;
  table["cvta.shared.u64"] = to_generic<kShared>;
  table["cvta.local.u64"] = to_generic<kLocal>;
  table["cvta.param.u64"] = to_generic<kParam>;
  table["cvta.to.shared.u64"] = from_generic<kShared>;
  table["cvta.to.local.u64"] = from_generic<kLocal>;
  table["isspacep.shared"] = is_in_space<kShared>;
  table["isspacep.local"] = is_in_space<kLocal>;
  table["isspacep.global"] = is_in_space<0>;
}

}  // namespace

void add_memory(Table& table) {
  add_type<uint8_t>(table, "u8");
  add_type<uint8_t>(table, "b8");
  add_type<int8_t>(table, "s8");
  add_type<uint16_t>(table, "u16");
  add_type<uint16_t>(table, "b16");
  add_type<int16_t>(table, "s16");
  for (const char* type : {"u32", "b32", "f32"}) add_type<uint32_t>(table, type);
  add_type<int32_t>(table, "s32");
  for (const char* type : {"u64", "b64", "s64", "f64"}) add_type<uint64_t>(table, type);
  add_addresses(table);
}

}  // namespace quire::emulator
