#include "cuda/emulator/builder.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>

#include "cuda/emulator/scan.h"

namespace quire::emulator {
namespace {

constexpr uint64_t kPoison = 0xDEADBEEFDEADBEEF;

std::size_t aligned(std::size_t offset, std::size_t align) { return (offset + align - 1) / align * align; }

/// 12, -3, 0x1F, 0f3F800000 (the bits of a float), 0d3FF0000000000000 (of a double).
std::optional<uint64_t> immediate(std::string text) {
  if (text == "WARP_SZ") return 32;
  if (text.ends_with('U')) text.pop_back();
  const bool real = text.starts_with("0f") || text.starts_with("0d"), negative = text.starts_with("-");
  const bool hex = real || text.starts_with("0x") || text.starts_with("0X");
  const char* begin = text.data() + (hex ? 2 : negative ? 1 : 0);
  const char* end = text.data() + text.size();
  uint64_t value = 0;
  const auto [stop, error] = std::from_chars(begin, end, value, hex ? 16 : 10);
  if (error != std::errc() || stop != end || begin == end) return std::nullopt;
  return negative ? 0 - value : value;
}

}  // namespace

Variable::Variable(const std::string& text) {
  std::istringstream words(text);
  bool of_pointee = false;  // .ptr says where a pointer leads
  for (std::string word; words >> word;) {
    if (word == ".ptr") of_pointee = true;
    if (word == ".align" && of_pointee)
      words >> word;
    else if (word == ".align")
      words >> align;
    else if (word == ".pred")
      throw Error("a predicate as a variable: " + text);
    else if (word.size() > 2 && word[0] == '.' && word.find_first_of("0123456789") == 2)
      width = std::stoul(word.substr(2)) / 8;
    else if (word[0] != '.' && name.empty())
      name = word;
  }
  align = std::max(align, width);
  for (auto bracket = name.find('['); bracket != std::string::npos; bracket = name.find('[', bracket + 1)) {
    open = open || name[bracket + 1] == ']';
    count *= open ? 0 : std::stoul(name.substr(bracket + 1));
  }
  name.resize(std::min(name.find('['), name.size()));
}

std::size_t Variable::place(std::size_t& size) const {
  const std::size_t offset = aligned(size, align);
  size = offset + bytes();
  return offset;
}

FunctionBuilder::FunctionBuilder(const Variables& variables, const std::string& header) : variables_(variables) {
  scopes_.push_back({0, {}, {}, {}});
  is_kernel = header.find(".entry") != std::string::npos;
  std::size_t at = header.find(is_kernel ? ".entry" : ".func") + (is_kernel ? 6 : 5);
  std::string results;
  const auto list = [&] {
    const std::size_t open = header.find('(', at), close = header.find(')', at);
    at = close + 1;
    return header.substr(open + 1, close - open - 1);
  };
  at = header.find_first_not_of(" \t\r\n", at);
  if (header[at] == '(') results = list();
  at = header.find_first_not_of(" \t\r\n", at);
  const std::size_t end = std::min(header.find_first_of("( \t\r\n", at), header.size());
  function_.name = header.substr(at, end - at);
  if (header.find('(', at) != std::string::npos) parameters(list(), function_.parameters);
  function_.parameter_bytes = function_.area_bytes;
  parameters(results, function_.results);
  for (const char* limit : {".maxntid", ".reqntid"})
    if (const auto found = header.find(limit); found != std::string::npos) {
      std::size_t threads = 1;
      const std::string numbers = header.substr(found + 8);
      for (const std::string& n : split(numbers.substr(0, numbers.find_first_of(".{")))) threads *= std::stoul(n);
      function_.most_threads = threads;
    }
  function_.shared_bytes = variables.shared_bytes;
}

void FunctionBuilder::parameters(const std::string& list, std::vector<Parameter>& to) {
  for (const std::string& text : split(list)) {
    const Variable v(text);
    const std::size_t offset = v.place(function_.area_bytes);
    to.push_back({offset, v.bytes()});
    scopes_[0].areas[v.name] = {offset, v.bytes()};
  }
}

void FunctionBuilder::open() {
  scopes_.push_back({scope_, {}, {}, {}});
  scope_ = scopes_.size() - 1;
}
void FunctionBuilder::close() { scope_ = scopes_[scope_].parent; }

void FunctionBuilder::label(const std::string& name) {
  scopes_[scope_].labels[name] = function_.code.size();
  last_label_ = name;
}

void FunctionBuilder::statement(const std::string& text) {
  if (text.starts_with('.'))
    directive(text);
  else if (!text.empty())
    instruction(text);
}

void FunctionBuilder::directive(const std::string& text) {
  const std::string word = text.substr(0, text.find_first_of(" \t\r\n"));
  Scope& scope = scopes_[scope_];
  if (word == ".reg") {
    std::string names = trimmed(text.substr(4));
    names = names.substr(names.find_first_of(" \t"));  // behind the type
    for (const std::string& name : split(names)) {
      if (const auto range = name.find('<'); range != std::string::npos)
        ranges_.insert(name.substr(0, range));
      else
        scope.slots[name] = fresh(kPoison);
    }
  } else if (word == ".param") {
    const Variable v(text);
    scope.areas[v.name] = {v.place(function_.area_bytes), v.bytes()};
  } else if (word == ".local") {
    const Variable v(text);
    // The frame of the function begins where it is called.
    if (function_.local_bytes != 0) throw Error("a second array of local memory: " + text);
    v.place(function_.local_bytes);
    scope.slots[v.name] = special("%local_base");
  } else if (word == ".shared") {
    if (!is_kernel) throw Error("shared memory that a function declares: " + text);
    const Variable v(text);
    scope.slots[v.name] = fresh(kSharedBegin + v.place(function_.shared_bytes));
  } else if (word == ".branchtargets") {
    targets_[last_label_] = split(text.substr(word.size()));
  } else if (word != ".pragma" && word != ".callprototype") {
    throw Error("a directive that the emulator does not know: " + text);
  }
}

int FunctionBuilder::fresh(uint64_t value) {
  function_.registers.push_back(value);
  return static_cast<int>(function_.registers.size()) - 1;
}

int FunctionBuilder::special(const std::string& name) {
  const auto value = special_register(name);
  if (!value) throw Error("a register that the emulator does not know: " + name);
  const auto [found, is_new] = specials_.try_emplace(name, 0);
  if (is_new) {
    found->second = fresh(kPoison);
    function_.specials.push_back({found->second, value});
  }
  return found->second;
}

Area FunctionBuilder::area(const std::string& name) const {
  for (std::size_t s = scope_;; s = scopes_[s].parent) {
    if (const auto found = scopes_[s].areas.find(name); found != scopes_[s].areas.end()) return found->second;
    if (s == 0) break;
  }
  throw Error("no parameter " + name);
}

int FunctionBuilder::slot(const std::string& name) {
  if (name == "_") return fresh(kPoison);
  for (std::size_t s = scope_;; s = scopes_[s].parent) {
    if (const auto found = scopes_[s].slots.find(name); found != scopes_[s].slots.end()) return found->second;
    if (const auto found = scopes_[s].areas.find(name); found != scopes_[s].areas.end())
      return scopes_[s].slots[name] = fresh(found->second.offset);
    if (s == 0) break;
  }
  if (name.starts_with('%')) {
    const std::string range = name.substr(0, name.find_last_not_of("0123456789") + 1);
    if (ranges_.contains(range)) return scopes_[0].slots[name] = fresh(kPoison);
    return special(name);
  }
  if (const auto value = immediate(name)) {
    const auto [found, is_new] = immediates_.try_emplace(*value, 0);
    if (is_new) found->second = fresh(*value);
    return found->second;
  }
  if (variables_.dynamic.contains(name)) return special("%dynamic_shared");
  if (const auto found = variables_.addresses.find(name); found != variables_.addresses.end())
    return scopes_[0].slots[name] = fresh(found->second);
  throw Error("an operand that the emulator does not know: " + name);
}

/// Two results "a|b"; the second one may be missing.
int FunctionBuilder::pair(const std::string& text, Operands& to) {
  const auto bar = text.find('|');
  to.slots.push_back(slot(trimmed(text.substr(0, bar))));
  to.slots.push_back(slot(bar == std::string::npos ? "_" : trimmed(text.substr(bar + 1))));
  return to.slots.back();
}

void FunctionBuilder::emit(const std::string& name, const Operands& operands, int target) {
  Instruction i;
  i.run = operation(name);
  if (!i.run) throw Error(reason_to_refuse(name));
  i.target = target;
  i.offset = operands.offset;
  i.values = static_cast<int>(operands.slots.size());
  const bool loads = name.starts_with("ld.") || name.starts_with("st.");
  if (loads) --i.values;
  if (operands.slots.size() > i.at.size()) {
    i.target = static_cast<int>(function_.operands.size());
    function_.operands.insert(function_.operands.end(), operands.slots.begin(), operands.slots.end());
  } else {
    std::copy(operands.slots.begin(), operands.slots.end(), i.at.begin());
  }
  function_.code.push_back(i);
  function_.texts.push_back(text_);
}

void FunctionBuilder::refuse(const std::string& why) {
  function_.refusals.push_back(why);
  emit("refuse", {}, static_cast<int>(function_.refusals.size()) - 1);
}

void FunctionBuilder::instruction(const std::string& whole) {
  std::istringstream words(whole);
  text_.clear();
  for (std::string word; words >> word;) text_ += (text_.empty() ? "" : " ") + word;
  std::string text = text_;
  const std::size_t begin = function_.code.size();
  bool around = false;  // a branch of the threads for which it does not run
  try {
    if (text.starts_with('@')) {
      const auto space = text.find(' ');
      const bool negated = text[1] == '!';
      const int guard = slot(text.substr(negated ? 2 : 1, space - (negated ? 2 : 1)));
      text = text.substr(space + 1);
      if (text.starts_with("bra ") || text.starts_with("bra.uni ")) {
        branches_.push_back({begin, scope_, text.substr(text.find(' ') + 1)});
        return emit(negated ? "bra.unless" : "bra.if", {{guard}});
      }
      emit(negated ? "bra.if" : "bra.unless", {{guard}});
      around = true;
    }
    const auto space = std::min(text.find(' '), text.size());
    unguarded(text.substr(0, space), trimmed(text.substr(space)));
  } catch (const Error& e) {
    const std::size_t keep = begin + (around ? 1 : 0);
    function_.code.resize(keep);
    function_.texts.resize(keep);
    refuse(e.what());
  }
  if (around) function_.code[begin].target = static_cast<int>(function_.code.size() - begin);
}

void FunctionBuilder::unguarded(const std::string& whole_name, const std::string& rest) {
  const std::string name = plain_name(whole_name);
  const std::string head = name.substr(0, name.find('.'));
  if (head == "bra") {
    branches_.push_back({function_.code.size(), scope_, rest});
    return emit("bra", {});
  }
  const std::vector<std::string> operands = split(rest);
  if (head == "setp") return compare(name, operands);
  if (head == "mov") return move(name, operands);
  if (head == "ld" || head == "st" || head == "atom") return access(name, operands);
  if (head == "call") return call(operands);
  if (head == "brx") return branch_by_index(operands);
  plain(name, operands);
}

}  // namespace quire::emulator
