#include "cuda/mutation.h"

#include <map>
#include <optional>
#include <regex>
#include <sstream>

namespace quire::testing {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream all(text);
  for (std::string line; std::getline(all, line);) lines.push_back(line);
  return lines;
}

/// A whole line: perhaps a guard, the name, the operands.
const std::regex kInstruction(R"(^\s*(@!?%p\d+\s+)?([a-z][\w.:]*)\s*(.*);$)");

std::optional<std::string> with_next_number(const std::string& operands, const std::regex& number, int step) {
  std::smatch m;
  if (!std::regex_search(operands, m, number)) return std::nullopt;
  return m.prefix().str() + m[1].str() + std::to_string(std::stoll(m[2].str()) + step) + m[3].str() + m.suffix().str();
}

/// Bytes of a value of ".u16" or ".v4.f32"'s type.
int bytes_of(const std::string& name) {
  const auto digits = name.find_last_not_of("0123456789") + 1;
  return digits < name.size() ? std::stoi(name.substr(digits)) / 8 : 4;
}

std::optional<std::string> another_address(int bytes, const std::string& operands) {
  static const std::regex register_alone(R"(\[(%\w+)\])");
  static const std::regex offset(R"((\[%?\w+\+)(-?\d+)(\]))");
  if (const auto moved = with_next_number(operands, offset, bytes)) return moved;
  if (!std::regex_search(operands, register_alone)) return std::nullopt;
  return std::regex_replace(operands, register_alone, "[$1+" + std::to_string(bytes) + "]");
}

std::optional<std::string> another_operation(const std::string& name) {
  static const std::map<std::string, std::string> opposites{
      {"add.s32", "sub.s32"},       {"sub.s32", "add.s32"}, {"add.s64", "sub.s64"},       {"sub.s64", "add.s64"},
      {"or.b32", "and.b32"},        {"and.b32", "or.b32"},  {"shl.b32", "shr.u32"},       {"shr.u32", "shl.b32"},
      {"min.f32", "max.f32"},       {"max.f32", "min.f32"}, {"add.rn.f32", "sub.rn.f32"}, {"sub.rn.f32", "add.rn.f32"},
      {"mul.rn.f32", "add.rn.f32"}, {"min.s32", "max.s32"}, {"max.s32", "min.s32"},       {"min.u32", "max.u32"},
      {"max.u32", "min.u32"}};
  const auto found = opposites.find(name);
  return found == opposites.end() ? std::nullopt : std::optional(found->second);
}

/// Of a comparison its border: less, less or equal.
std::optional<std::string> another_comparison(const std::string& name) {
  static const std::regex parts(R"(^setp\.(\w+)\.(.*)$)");
  static const std::map<std::string, std::string> borders{{"lt", "le"}, {"le", "lt"}, {"gt", "ge"},
                                                          {"ge", "gt"}, {"eq", "ne"}, {"ne", "eq"}};
  std::smatch m;
  if (!std::regex_match(name, m, parts) || !borders.contains(m[1].str())) return std::nullopt;
  return "setp." + borders.at(m[1].str()) + "." + m[2].str();
}

bool is_arithmetic(const std::string& name) {
  static const std::regex integers(R"(^(add|sub|mul\.lo|mul\.wide|mad\.lo|and|or|xor|shl|shr)\.[sub](16|32|64)$)");
  return std::regex_match(name, integers);
}

bool starts_with_one_of(const std::string& name, std::initializer_list<const char*> words) {
  for (const char* word : words)
    if (name.starts_with(word)) return true;
  return false;
}

class Search {
 public:
  explicit Search(const std::string& ptx) : lines_(lines_of(ptx)) {}
  std::vector<Mutant> mutants();

 private:
  void instruction(std::size_t n, const std::string& name, const std::string& operands);
  void swap(std::size_t n, const std::string& name, const std::string& operands);
  void add(const char* kind, std::size_t n, const std::string& after) {
    found_.push_back({kind, function_, n, lines_[n], after});
  }

  std::vector<std::string> lines_;
  std::string function_;
  std::vector<Mutant> found_;
  std::string last_load_;
  std::size_t last_line_ = 0;
};

void Search::swap(std::size_t n, const std::string& name, const std::string& operands) {
  static const std::regex result(R"(^(%\w+)(,.*)$)");
  std::smatch mine, other, whole;
  const bool near = n - last_line_ <= 8 && last_load_ == name;
  const std::size_t before = last_line_;
  last_load_ = name;
  last_line_ = n;
  if (!near || !std::regex_match(lines_[before], whole, kInstruction)) return;
  const std::string others = whole[3].str();
  if (!std::regex_match(operands, mine, result) || !std::regex_match(others, other, result)) return;
  // The first one's result must not be used in between.
  for (std::size_t k = before + 1; k <= n; ++k)
    if (std::regex_search(lines_[k], std::regex(other[1].str() + R"(\b)"))) return;
  Mutant m{"swap", function_, n, lines_[n], "\t" + name + " \t" + other[1].str() + mine[2].str() + ";", before, ""};
  m.other_after = "\t" + name + " \t" + mine[1].str() + other[2].str() + ";";
  found_.push_back(m);
}

void Search::instruction(std::size_t n, const std::string& name, const std::string& operands) {
  const std::string& line = lines_[n];
  const auto head = line.substr(0, line.find(name));
  const auto renamed = [&](const std::string& other) { return head + other + " \t" + operands + ";"; };
  const auto with = [&](const std::string& other) { return head + name + " \t" + other + ";"; };
  static const std::regex lane(R"((, )(\d+)(, -?\d+, (?:-1|%r\d+|0x\w+|\d+)$))"), last(R"((, )(-?\d+)($))");
  if (starts_with_one_of(name, {"bar.sync", "bar.warp.sync", "bar.arrive", "barrier.", "cp.async.wait"}))
    add("barrier", n, "");
  if (name.starts_with("shfl.")) {
    if (const auto other = with_next_number(operands, lane, 1)) add("shuffle", n, with(*other));
    if (name.find(".down") != name.npos) add("shuffle", n, renamed(std::regex_replace(name, std::regex("down"), "up")));
    if (name.find(".up") != name.npos) add("shuffle", n, renamed(std::regex_replace(name, std::regex("up"), "down")));
  }
  const bool loads = starts_with_one_of(name, {"ld.global", "ld.shared"});
  if (loads || starts_with_one_of(name, {"st.global", "st.shared", "atom.", "red."}))
    if (const auto other = another_address(bytes_of(name), operands)) add("index", n, with(*other));
  if (name.starts_with("ldmatrix."))
    if (const auto other = another_address(16, operands)) add("matrix", n, with(*other));
  if (loads) swap(n, name, operands);
  if (is_arithmetic(name))
    if (const auto other = with_next_number(operands, last, 1)) add("constant", n, with(*other));
  if (const auto other = another_comparison(name)) add("comparison", n, renamed(*other));
  if (const auto other = another_operation(name)) add("operation", n, renamed(*other));
}

std::vector<Mutant> Search::mutants() {
  static const std::regex entry(R"(^\.visible \.entry (\w+)\(.*$|^\.(?:weak )?func .*$)");
  for (std::size_t n = 0; n < lines_.size(); ++n) {
    std::smatch m;
    if (std::regex_match(lines_[n], m, entry))
      function_ = m[1].matched ? m[1].str() : "a function";
    else if (std::regex_match(lines_[n], m, kInstruction))
      instruction(n, m[2].str(), m[3].str());
  }
  return std::move(found_);
}

}  // namespace

std::vector<Mutant> mutants_of(const std::string& ptx) { return Search(ptx).mutants(); }

std::string mutated(const std::string& ptx, const Mutant& mutant) {
  std::vector<std::string> lines = lines_of(ptx);
  lines[mutant.line] = mutant.after;
  if (!mutant.other_after.empty()) lines[mutant.other_line] = mutant.other_after;
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

}  // namespace quire::testing
