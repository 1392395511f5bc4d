// The instructions whose text is not a name and plain operands.
#include <algorithm>

#include "cuda/emulator/builder.h"
#include "cuda/emulator/scan.h"

namespace quire::emulator {
namespace {

std::vector<std::string> list(const std::string& text) {
  return split(std::string_view(text).substr(1, text.size() - 2));
}
bool is_list(const std::string& text) { return text.starts_with('{'); }

}  // namespace

/// Such as setp.lt.and.s32 p|q, a, b, c: p = (a < b) and c, q = not (a < b) and c.
void FunctionBuilder::compare(const std::string& name, std::vector<std::string> operands) {
  std::string plain_compare = name, join;
  for (const char* word : {".and", ".or", ".xor"})
    if (const auto found = name.find(std::string(word) + "."); found != std::string::npos) {
      plain_compare.erase(found, std::string(word).size());
      join = std::string(word).substr(1) + ".pred";
    }
  Operands results;
  const int other = pair(operands.at(0), results);
  const int first = results.slots[0], result = join.empty() ? first : fresh(0);
  emit(plain_compare, {{result, slot(operands.at(1)), slot(operands.at(2))}});
  const bool has_other = operands[0].find('|') != std::string::npos;
  if (has_other) emit("not.pred", {{other, result}});
  if (join.empty()) return;
  // A copy, because c may be a result too.
  const std::string& c = operands.at(3);
  const int with = fresh(0);
  emit(c.starts_with('!') ? "not.pred" : "mov.pred", {{with, slot(c.starts_with('!') ? c.substr(1) : c)}});
  emit(join, {{first, result, with}});
  if (has_other) emit(join, {{other, other, with}});
}

void FunctionBuilder::move(const std::string& name, const std::vector<std::string>& operands) {
  if (operands.size() != 2) throw Error("a move of other than two operands");
  const bool packs = is_list(operands[1]), unpacks = is_list(operands[0]);
  if (!packs && !unpacks) return plain(name, operands);
  const std::vector<std::string> parts = list(operands[packs ? 1 : 0]);
  const std::size_t bits = std::stoul(name.substr(name.find_first_of("0123456789"))) / parts.size();
  Operands all;
  if (packs) all.slots.push_back(slot(operands[0]));
  for (const std::string& part : parts) all.slots.push_back(slot(part));
  if (unpacks) all.slots.push_back(slot(operands[1]));
  emit((packs ? "pack.b" : "unpack.b") + std::to_string(bits), all);
}

/// Such as [%rd1+8]: the register, and the number behind it.
int FunctionBuilder::address(const std::string& text, int64_t& offset) {
  std::string at = trimmed(std::string_view(text).substr(1, text.size() - 2));
  if (const auto plus = at.find('+'); plus != std::string::npos) {
    offset = std::stoll(at.substr(plus + 1));
    at = trimmed(at.substr(0, plus));
  }
  return slot(at);
}

/// Loads, stores and atomic operations: values, then the address; of atomic ones the result, the address, the values.
void FunctionBuilder::access(const std::string& name, std::vector<std::string> operands) {
  const bool is_atomic = name.starts_with("atom.");
  Operands all;
  std::vector<int> address_slots;
  for (const std::string& operand : operands) {
    if (operand.starts_with('[')) {
      address_slots.push_back(address(operand, all.offset));
      if (!is_atomic) continue;
      if (all.slots.empty()) all.slots.push_back(slot("_"));  // red has no result
      all.slots.push_back(address_slots[0]);
    } else if (is_list(operand)) {
      for (const std::string& part : list(operand)) all.slots.push_back(slot(part));
    } else if (address_slots.empty() || name.starts_with("st.") || is_atomic) {
      // What follows the address of a load is a policy for caches.
      if (all.slots.empty() || is_atomic) all.slots.push_back(slot(operand));
    }
  }
  if (address_slots.size() != 1) throw Error("an access of other than one address");
  if (!is_atomic) all.slots.push_back(address_slots[0]);
  emit(name, all);
}

/// Such as (retval0), f, (param0, param1).
void FunctionBuilder::call(const std::vector<std::string>& operands) {
  Call made;
  std::string callee;
  std::vector<Call::Copy>* to = nullptr;
  for (const std::string& operand : operands) {
    if (!operand.starts_with('(')) {
      if (callee.empty()) callee = operand;
      continue;
    }
    to = callee.empty() ? &made.results : &made.arguments;
    for (const std::string& name : list(operand)) {
      const Area mine = area(name);
      // The other side's place follows when the whole module is known.
      to->push_back({mine.offset, mine.offset, mine.bytes});
    }
  }
  if (callee.empty() || callee.starts_with('%')) throw Error("a call of a function by its address");
  function_.calls.push_back(made);
  callees.push_back(callee);
  emit("call", {}, static_cast<int>(function_.calls.size()) - 1);
}

void FunctionBuilder::branch_by_index(const std::vector<std::string>& operands) {
  indexed_.push_back({function_.code.size(), operands.at(1)});
  emit("brx.idx", {{slot(operands.at(0))}}, static_cast<int>(indexed_.size()) - 1);
}

void FunctionBuilder::plain(const std::string& name, const std::vector<std::string>& operands) {
  Operands all;
  const bool has_pair = name.starts_with("shfl.") || name.starts_with("match.all.") || name.starts_with("elect.");
  for (std::size_t n = 0; n < operands.size(); ++n) {
    const std::string& operand = operands[n];
    if (n == 0 && has_pair) {
      pair(operand, all);
    } else if (operand.starts_with('!')) {
      const int negated = fresh(0);
      emit("not.pred", {{negated, slot(operand.substr(1))}});
      all.slots.push_back(negated);
    } else if (is_list(operand)) {
      for (const std::string& part : list(operand)) all.slots.push_back(slot(part));
    } else if (operand.starts_with('[')) {
      int64_t offset = 0;
      const int base = address(operand, offset), sum = offset ? fresh(0) : base;
      if (offset) emit("add.s64", {{sum, base, slot(std::to_string(offset))}});
      all.slots.push_back(sum);
    } else {
      all.slots.push_back(slot(operand));
    }
  }
  emit(name, all);
}

Function FunctionBuilder::finish() {
  text_ = "the end";
  emit(is_kernel ? "exit" : "ret", {});
  const auto distance = [&](std::size_t from, std::size_t scope, const std::string& label) {
    for (std::size_t s = scope;; s = scopes_[s].parent) {
      if (const auto found = scopes_[s].labels.find(label); found != scopes_[s].labels.end())
        return static_cast<int>(found->second) - static_cast<int>(from);
      if (s == 0) throw Error("no label " + label + " in " + function_.name);
    }
  };
  for (const Reference& r : branches_) function_.code[r.instruction].target = distance(r.instruction, r.scope, r.label);
  for (const auto& [from, name] : indexed_) {
    const auto found = targets_.find(name);
    if (found == targets_.end()) throw Error("no targets " + name + " in " + function_.name);
    std::vector<int>& table = function_.tables.emplace_back();
    for (const std::string& label : found->second) table.push_back(distance(from, 0, label));
  }
  return std::move(function_);
}

}  // namespace quire::emulator
