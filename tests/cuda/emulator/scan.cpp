#include "cuda/emulator/scan.h"

#include <algorithm>

#include "cuda/emulator/emulator.h"

namespace quire::emulator {
namespace {

constexpr const char* kSpace = " \t\r\n";

std::string without_comments(std::string_view ptx) {
  std::string out;
  for (std::size_t at = 0; at < ptx.size();) {
    const bool line = ptx.substr(at, 2) == "//", block = ptx.substr(at, 2) == "/*";
    if (!line && !block) {
      out += ptx[at++];
      continue;
    }
    const std::size_t end = ptx.find(line ? "\n" : "*/", at);
    at = end == std::string_view::npos ? ptx.size() : end + (line ? 0 : 2);
  }
  return out;
}

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }

}  // namespace

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(kSpace), last = text.find_last_not_of(kSpace);
  return first == std::string_view::npos ? std::string() : std::string(text.substr(first, last - first + 1));
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t at = 0; at <= text.size(); ++at) {
    const char c = at < text.size() ? text[at] : ',';
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    if (c != ',' || depth != 0) continue;
    parts.push_back(trimmed(text.substr(begin, at - begin)));
    begin = at + 1;
  }
  if (parts.size() == 1 && parts[0].empty()) parts.clear();
  return parts;
}

std::size_t number_after(std::string_view text, std::string_view word) {
  const auto at = text.find(word);
  if (at == std::string_view::npos) throw Error("no " + std::string(word) + " in: " + std::string(text));
  return std::stoul(trimmed(text.substr(at + word.size())));
}

Scanner::Scanner(std::string_view ptx) : text_(without_comments(ptx)) {}

std::size_t Scanner::find(const char* characters) const {
  const std::size_t found = text_.find_first_of(characters, at_);
  if (found == std::string::npos) throw Error("PTX that ends within: " + text_.substr(at_, 80));
  return found;
}

Statement Scanner::cut(Statement::Kind kind, std::size_t end, std::size_t skip) {
  Statement s{kind, trimmed(std::string_view(text_).substr(at_, end - at_))};
  at_ = end + skip;
  return s;
}

Statement Scanner::next() {
  at_ = std::min(text_.find_first_not_of(kSpace, at_), text_.size());
  if (at_ == text_.size()) return {};
  for (const char* line : {".version ", ".target ", ".address_size ", ".file\t", ".file ", ".loc\t", ".loc "})
    if (starts_with(line)) {
      at_ = std::min(text_.find('\n', at_), text_.size());
      return next();
    }
  if (starts_with(".section")) {
    at_ = find("}") + 1;
    return next();
  }
  if (text_[at_] == '{') return cut(Statement::Kind::open, at_, 1);
  if (text_[at_] == '}') return cut(Statement::Kind::close, at_, 1);
  std::size_t name = at_;
  while (name < text_.size() && is_name(text_[name])) ++name;
  const std::size_t colon = text_.find_first_not_of(kSpace, name);
  if (name > at_ && colon != std::string::npos && text_[colon] == ':') return cut(Statement::Kind::label, colon, 1);
  const std::string_view head = std::string_view(text_).substr(at_, find(";{=") - at_);
  if (head.starts_with('.') && (head.find(".entry") != head.npos || head.find(".func") != head.npos)) {
    const std::size_t end = find(";{");
    const bool has_body = text_[end] == '{';
    return cut(Statement::Kind::function, end + (has_body ? 0 : 1), 0);
  }
  return cut(Statement::Kind::text, find(";"), 1);
}

}  // namespace quire::emulator
