// The text of PTX, cut into statements.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace quire::emulator {

struct Statement {
  enum class Kind { function, open, close, label, text, end };
  Kind kind = Kind::end;
  std::string text;  ///< without what ends it; of a function the text before its body, or with ';' where it has none
};

class Scanner {
 public:
  explicit Scanner(std::string_view ptx);
  Statement next();

 private:
  bool starts_with(std::string_view word) const { return text_.compare(at_, word.size(), word) == 0; }
  std::size_t find(const char* characters) const;
  Statement cut(Statement::Kind kind, std::size_t end, std::size_t skip);

  std::string text_;  ///< without comments
  std::size_t at_ = 0;
};

std::string trimmed(std::string_view text);
/// Parts between commas that are in no brackets, trimmed; none of empty text.
std::vector<std::string> split(std::string_view text);
/// The number after a word such as ".align". Throws Error where there is none.
std::size_t number_after(std::string_view text, std::string_view word);

}  // namespace quire::emulator
