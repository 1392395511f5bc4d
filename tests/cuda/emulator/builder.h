// Makes a function of the statements of its body.
#pragma once

#include <set>

#include "cuda/emulator/program.h"

namespace quire::emulator {

/// A variable as PTX declares it, such as ".param .align 8 .b8 name[408]".
struct Variable {
  std::string name;
  std::size_t align = 1, width = 1, count = 1;
  bool open = false;  ///< of a size that the launch gives

  explicit Variable(const std::string& text);
  std::size_t bytes() const { return width * count; }
  /// Puts it behind `size` bytes, which grow; returns where.
  std::size_t place(std::size_t& size) const;
};

/// Variables of a module.
struct Variables {
  std::map<std::string, uint64_t> addresses;
  std::set<std::string> dynamic;  ///< shared memory whose size the launch gives
  std::size_t shared_bytes = 0;
};

class FunctionBuilder {
 public:
  /// header: such as ".visible .entry name(.param .u64 name_param_0)".
  FunctionBuilder(const Variables& variables, const std::string& header);

  bool is_kernel = false;
  void open();
  void close();
  void label(const std::string& name);
  /// A directive or an instruction.
  void statement(const std::string& text);
  Function finish();
  /// The functions that it calls, in the order of Function::calls.
  std::vector<std::string> callees;

 private:
  struct Operands {
    std::vector<int> slots;
    int64_t offset = 0;
  };
  struct Scope {
    std::size_t parent;
    std::map<std::string, int> slots;
    std::map<std::string, Area> areas;
    std::map<std::string, std::size_t> labels;
  };
  struct Reference {
    std::size_t instruction, scope;
    std::string label;
  };

  void directive(const std::string& text);
  void instruction(const std::string& text);
  void unguarded(const std::string& name, const std::string& rest);
  void compare(const std::string& name, std::vector<std::string> operands);
  void move(const std::string& name, const std::vector<std::string>& operands);
  void access(const std::string& name, std::vector<std::string> operands);
  void call(const std::vector<std::string>& operands);
  void branch_by_index(const std::vector<std::string>& operands);
  void plain(const std::string& name, const std::vector<std::string>& operands);
  void emit(const std::string& name, const Operands& operands, int target = 0);
  void refuse(const std::string& why);
  void parameters(const std::string& list, std::vector<Parameter>& to);

  int fresh(uint64_t value);
  int slot(const std::string& name);
  int special(const std::string& name);
  int pair(const std::string& text, Operands& to);
  int address(const std::string& text, int64_t& offset);
  Area area(const std::string& name) const;

  const Variables& variables_;
  Function function_;
  std::vector<Scope> scopes_;
  std::size_t scope_ = 0;
  std::set<std::string> ranges_;  ///< of registers: "%r" of ".reg .b32 %r<10>"
  std::map<std::string, int> specials_;
  std::map<uint64_t, int> immediates_;
  std::vector<Reference> branches_;
  std::map<std::string, std::vector<std::string>> targets_;  ///< of branches by index, by label
  std::vector<std::pair<std::size_t, std::string>> indexed_;
  std::string last_label_;
  std::string text_;  ///< of the instruction that is being made
};

/// The name of an operation without what does not change its result here, such as hints for caches.
std::string plain_name(const std::string& name);
/// Why an operation that is not known is not.
std::string reason_to_refuse(const std::string& name);

}  // namespace quire::emulator
