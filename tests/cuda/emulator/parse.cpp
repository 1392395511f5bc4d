#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>

#include "cuda/emulator/program.h"

namespace quire::emulator {
namespace {

constexpr uint64_t kPoison = 0xDEADBEEFDEADBEEF;

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
  return first == std::string_view::npos ? std::string() : std::string(text.substr(first, last - first + 1));
}

std::size_t number(std::string_view text, std::string_view after) {
  const auto at = text.find(after);
  if (at == std::string_view::npos) throw Error("no " + std::string(after) + " in: " + std::string(text));
  return std::stoul(trimmed(text.substr(at + after.size())));
}

/// 12, -3, 0x1F, 0f3F800000 (the bits of a float), 0d3FF0000000000000 (of a double).
std::optional<uint64_t> immediate(const std::string& text) {
  const bool real = text.starts_with("0f") || text.starts_with("0d"), negative = text.starts_with("-");
  const bool hex = real || text.starts_with("0x");
  const char* begin = text.data() + (hex ? 2 : negative ? 1 : 0);
  const char* end = text.data() + text.size();
  uint64_t value = 0;
  const auto [stop, error] = std::from_chars(begin, end, value, hex ? 16 : 10);
  if (error != std::errc() || stop != end || begin == end) return std::nullopt;
  return negative ? 0 - value : value;
}

/// Operands of an instruction one by one; {a, b} are two, and [a+8] is a and an offset.
std::vector<std::string> operands(std::string text, int64_t& offset) {
  std::vector<std::string> found;
  std::string one;
  for (const char c : text + ",") {
    if (c == '{' || c == '}') continue;
    if (c != ',') {
      one += c;
      continue;
    }
    one = trimmed(one);
    if (one.starts_with('[')) {
      one = one.substr(1, one.find(']') - 1);
      if (const auto plus = one.find('+'); plus != std::string::npos) {
        offset = std::stoll(one.substr(plus + 1));
        one.resize(plus);
      }
    }
    if (!one.empty()) found.push_back(one);
    one.clear();
  }
  return found;
}

class Parser {
 public:
  void line(const std::string& text);
  std::map<std::string, Program> kernels;

 private:
  void header(const std::string& text);
  void parameter(std::string_view text);
  void statement(const std::string& text);
  void instruction(std::string text);
  int slot(const std::string& name);
  void finish();

  Program* kernel_ = nullptr;
  bool in_body_ = false;
  std::map<std::string, std::size_t> labels_;
  std::map<std::size_t, std::string> branches_;  ///< labels of the branches
};

int Parser::slot(const std::string& name) {
  const auto [found, is_new] = kernel_->slots.try_emplace(name, static_cast<int>(kernel_->registers.size()));
  if (!is_new) return found->second;
  const bool is_register = name.starts_with('%');
  const std::optional<uint64_t> value = is_register ? kPoison : immediate(name);
  if (!value) throw Error("an operand that the emulator does not know: " + name);
  kernel_->registers.push_back(*value);
  return found->second;
}

/// Such as ".param .align 8 .b8 quantize_param_0[232]," or ".param .u64 f_param_1".
void Parser::parameter(std::string_view text) {
  std::istringstream words{std::string(text)};
  std::string word, name;
  std::size_t align = 0, width = 0, count = 1;
  while (words >> word) {
    if (word == ".align")
      words >> align;
    else if (word.size() > 2 && word[0] == '.' && word.find_first_of("0123456789") == 2)
      width = std::stoul(word.substr(2)) / 8;
    else if (word[0] != '.')
      name = word;
  }
  if (name.ends_with(',')) name.pop_back();
  if (const auto open = name.find('['); open != std::string::npos) {
    count = number(name, "[");
    name.resize(open);
  }
  align = align ? align : width;
  const std::size_t offset = (kernel_->parameter_bytes + align - 1) / align * align;
  kernel_->parameter_bytes = offset + width * count;
  const int slot = static_cast<int>(kernel_->registers.size());
  kernel_->slots[name] = slot;
  kernel_->registers.push_back(kPoison);
  kernel_->parameters.push_back({slot, offset});
}

void Parser::header(const std::string& text) {
  if (const auto entry = text.find(".entry "); entry != std::string::npos) {
    const std::string name = trimmed(text.substr(entry + 7, text.find('(') - entry - 7));
    kernel_ = &kernels[name];
    labels_.clear();
    branches_.clear();
  } else if (kernel_ && text.starts_with(".param")) {
    parameter(text);
  } else if (kernel_ && text == "{") {
    in_body_ = true;
  } else if (text.starts_with(".func") || text.find(".global") != std::string::npos) {
    throw Error("the emulator knows neither functions nor variables of a device: " + text);
  }
}

void Parser::statement(const std::string& text) {
  if (text.starts_with("$") && text.ends_with(':')) {
    labels_[text.substr(0, text.size() - 1)] = kernel_->code.size();
  } else if (text.starts_with(".local")) {
    kernel_->local_bytes = number(text, "[");
    const auto name = text.find("__local_depot");
    kernel_->local_slot = static_cast<int>(kernel_->registers.size());
    kernel_->slots[text.substr(name, text.find('[') - name)] = kernel_->local_slot;
    kernel_->registers.push_back(kPoison);
  } else if (text.ends_with(';')) {
    if (!text.starts_with(".")) instruction(text.substr(0, text.size() - 1));
  } else if (!text.starts_with(".")) {
    throw Error("a line that the emulator does not know: " + text);
  }
}

void Parser::instruction(std::string text) {
  Instruction i;
  i.text = text;
  if (text.starts_with('@')) {
    const auto space = text.find_first_of(" \t");
    i.guard_value = text[1] != '!';
    i.guard = slot(text.substr(i.guard_value ? 1 : 2, space - (i.guard_value ? 1 : 2)));
    text = trimmed(text.substr(space));
  }
  const auto space = std::min(text.find_first_of(" \t"), text.size());
  const std::string name = text.substr(0, space), rest = trimmed(text.substr(space));
  i.run = operation(name);
  const bool is_memory = name.starts_with("ld.") || name.starts_with("st.");
  if (!i.run || (rest.find('{') != std::string::npos && !is_memory))
    throw Error("an operation that the emulator does not know: " + i.text);
  if (name.starts_with("bra")) {
    branches_[kernel_->code.size()] = rest;
  } else {
    std::vector<std::string> all = operands(rest, i.offset);
    // A store has its address first.
    if (name.starts_with("st.")) std::rotate(all.begin(), all.begin() + 1, all.end());
    i.values = is_memory ? static_cast<int>(all.size()) - 1 : 0;
    if (all.size() > i.at.size()) throw Error("too many operands: " + i.text);
    for (std::size_t n = 0; n < all.size(); ++n) i.at[n] = slot(all[n]);
  }
  kernel_->code.push_back(i);
}

void Parser::finish() {
  for (const auto& [at, label] : branches_) {
    const auto found = labels_.find(label);
    if (found == labels_.end()) throw Error("no label " + label);
    kernel_->code[at].target = found->second;
  }
  kernel_ = nullptr;
  in_body_ = false;
}

void Parser::line(const std::string& whole) {
  const std::string text = trimmed(std::string_view(whole).substr(0, whole.find("//")));
  if (text.empty()) return;
  if (!in_body_)
    header(text);
  else if (text == "}")
    finish();
  else
    statement(text);
}

}  // namespace

std::map<std::string, Program> parse(std::string_view ptx) {
  Parser parser;
  std::istringstream lines{std::string(ptx)};
  for (std::string line; std::getline(lines, line);) parser.line(line);
  return parser.kernels;
}

}  // namespace quire::emulator
