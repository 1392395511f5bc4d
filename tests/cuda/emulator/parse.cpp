#include <algorithm>
#include <cstring>
#include <optional>

#include "cuda/emulator/builder.h"
#include "cuda/emulator/scan.h"

namespace quire::emulator {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view ptx) : scanner_(ptx) {}
  std::map<std::string, Program> kernels();

 private:
  void variable(const std::string& text);
  void constant(const Variable& v, const std::string& values);
  void function(const std::string& header);
  void link();

  Scanner scanner_;
  Variables variables_;
  std::shared_ptr<Module> module_ = std::make_shared<Module>();
  std::map<std::string, std::vector<std::string>> callees_;
  std::vector<std::string> kernels_;
};

/// Such as ".visible .const .align 4 .b8 table[8] = {1, 2, 3, 4}" or ".extern .shared .align 16 .b8 memory[]".
void Parser::variable(const std::string& text) {
  const auto equals = text.find('=');
  const Variable v(text.substr(0, equals));
  const auto has = [&](const char* word) { return text.substr(0, equals).find(word) != std::string::npos; };
  if (has(".shared")) {
    if (v.open || has(".extern"))
      variables_.dynamic.insert(v.name);
    else
      variables_.addresses[v.name] = kSharedBegin + v.place(variables_.shared_bytes);
  } else if (has(".const") || has(".global")) {
    constant(v, equals == std::string::npos ? "" : trimmed(text.substr(equals + 1)));
  } else {
    throw Error("a directive that the emulator does not know: " + text);
  }
}

void Parser::constant(const Variable& v, const std::string& values) {
  std::size_t size = module_->constants.size();
  const std::size_t begin = v.place(size);
  module_->constants.resize(size);
  variables_.addresses[v.name] = kConstants + begin;
  const bool is_list = values.starts_with('{');
  std::size_t at = begin;
  for (const std::string& value : split(is_list ? values.substr(1, values.size() - 2) : values)) {
    // The low bytes, as many as a value has.
    const bool real = value.starts_with("0f") || value.starts_with("0d");
    const auto bits = real                     ? std::stoull(value.substr(2), nullptr, 16)
                      : value.starts_with('-') ? static_cast<unsigned long long>(std::stoll(value, nullptr, 0))
                                               : std::stoull(value, nullptr, 0);
    if (at + v.width > size) throw Error("more values than " + v.name + " has");
    std::memcpy(module_->constants.data() + at, &bits, v.width);
    at += v.width;
  }
}

void Parser::function(const std::string& header) {
  FunctionBuilder builder(variables_, header);
  if (scanner_.next().kind != Statement::Kind::open) throw Error("a function without a body: " + header);
  for (int depth = 1; depth > 0;) {
    const Statement s = scanner_.next();
    switch (s.kind) {
      case Statement::Kind::open:
        ++depth;
        builder.open();
        break;
      case Statement::Kind::close:
        --depth;
        builder.close();
        break;
      case Statement::Kind::label:
        builder.label(s.text);
        break;
      case Statement::Kind::text:
        builder.statement(s.text);
        break;
      case Statement::Kind::function:
      case Statement::Kind::end:
        throw Error("a function that does not end: " + header);
    }
  }
  Function made = builder.finish();
  const std::string name = made.name;
  if (builder.is_kernel) kernels_.push_back(name);
  callees_[name] = builder.callees;
  module_->functions[name] = std::move(made);
}

/// Calls lead to functions that may come later.
void Parser::link() {
  const auto connect = [](std::vector<Call::Copy>& copies, const std::vector<Parameter>& other, bool to_callee) {
    if (copies.size() != other.size()) throw Error("a call with another number of parameters than its function has");
    for (std::size_t n = 0; n < copies.size(); ++n) {
      if (copies[n].bytes != other[n].bytes)
        throw Error("a call with a parameter of another size than its function has");
      (to_callee ? copies[n].to : copies[n].from) = other[n].offset;
    }
  };
  for (const auto& [name, callees] : callees_)
    for (std::size_t n = 0; n < callees.size(); ++n) {
      const auto found = module_->functions.find(callees[n]);
      if (found == module_->functions.end()) continue;  // refused where it is called
      Call& call = module_->functions.at(name).calls[n];
      call.callee = &found->second;
      connect(call.arguments, found->second.parameters, true);
      connect(call.results, found->second.results, false);
    }
}

std::map<std::string, Program> Parser::kernels() {
  for (Statement s = scanner_.next(); s.kind != Statement::Kind::end; s = scanner_.next()) {
    if (s.kind == Statement::Kind::function && !s.text.ends_with(';'))
      function(s.text);
    else if (s.kind == Statement::Kind::text && !s.text.starts_with(".pragma") && !s.text.starts_with(".alias"))
      variable(s.text);
    else if (s.kind != Statement::Kind::function && s.kind != Statement::Kind::text)
      throw Error("PTX that is not a function or a variable: " + s.text);
  }
  link();
  std::map<std::string, Program> all;
  for (const std::string& name : kernels_) all.emplace(name, Program(module_, module_->functions.at(name)));
  return all;
}

}  // namespace

std::map<std::string, Program> parse(std::string_view ptx) { return Parser(ptx).kernels(); }

std::vector<std::string> Program::refused() const {
  const Operation refuses = operation("refuse");
  std::vector<std::string> all;
  std::set<const Function*> known{kernel_};
  for (std::vector<const Function*> next{kernel_}; !next.empty();) {
    const Function& f = *next.back();
    next.pop_back();
    for (std::size_t n = 0; n < f.code.size(); ++n)
      if (f.code[n].run == refuses)
        all.push_back(f.texts[n] + ": " + f.refusals[static_cast<std::size_t>(f.code[n].target)]);
    for (const Call& call : f.calls)
      if (call.callee && known.insert(call.callee).second) next.push_back(call.callee);
  }
  return all;
}

}  // namespace quire::emulator
