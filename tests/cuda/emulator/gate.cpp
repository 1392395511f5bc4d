#include "cuda/emulator/gate.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>

namespace quire::emulator {
namespace {

std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 ? text.get() : name;
}

/// The name of the function or kernel that a line begins; "" of any other line.
std::string begun(const std::string& line) {
  const bool begins = line.starts_with(".func") || line.starts_with(".entry") || line.starts_with(".weak .func") ||
                      line.starts_with(".visible .func") || line.starts_with(".visible .entry");
  if (!begins) return "";
  // A result in brackets may come before the name.
  const auto result = line.find("func_retval0");
  const auto from = result == std::string::npos ? line.find_last_of(' ', line.find('(')) : line.find(' ', result);
  std::string name = line.substr(from + 1);
  return name.substr(0, name.find_first_of("( \t"));
}

/// Calls found(function, line) for each line of code, without the space before it.
template <class F>
void for_each_line(std::string_view ptx, F&& found) {
  std::istringstream lines{std::string(ptx)};
  std::string function;
  for (std::string line; std::getline(lines, line);) {
    line.erase(0, line.find_first_not_of(" \t"));
    if (const std::string name = begun(line); !name.empty()) function = name;
    found(function, line);
  }
}

}  // namespace

std::vector<std::string> host_references(std::string_view unoptimised) {
  std::vector<std::string> findings;
  bool null_object = false;
  for_each_line(unoptimised, [&](const std::string& function, const std::string& line) {
    if (line.find(".callprototype") != std::string::npos)
      findings.push_back(demangled(function) + ": calls a function that only the host has");
    if (line.find("callseq") != std::string::npos) null_object = false;
    if (line.starts_with("st.param.b64") && line.find("[param0+0], 0;") != std::string::npos) null_object = true;
    if (!null_object || !line.starts_with("_ZNK")) return;
    findings.push_back(demangled(function) + ": reads a table of the host by " +
                       demangled(line.substr(0, line.find_first_of(", "))));
    null_object = false;
  });
  return findings;
}

std::vector<std::string> traps(std::string_view optimised) {
  std::vector<std::string> findings;
  for_each_line(optimised, [&](const std::string& function, const std::string& line) {
    if (line == "trap;") findings.push_back(function);
  });
  return findings;
}

std::vector<Assembled> assembled(std::string_view ptxas) {
  std::vector<Assembled> all;
  for_each_line(ptxas, [&](const std::string&, const std::string& line) {
    // Such as "ptxas info : Compiling entry function 'k' for 'sm_90'", then a line of numbers.
    if (line.find("Compiling entry function") != std::string::npos) {
      const auto name = line.find('\'') + 1, end = line.find('\'', name), chip = line.find('\'', end + 1) + 1;
      all.push_back({line.substr(name, end - name), line.substr(chip, line.find('\'', chip) - chip)});
    }
    unsigned long stack = 0, stores = 0, loads = 0;
    const char* const numbers = "%lu bytes stack frame, %lu bytes spill stores, %lu bytes spill loads";
    if (!all.empty() && std::sscanf(line.c_str(), numbers, &stack, &stores, &loads) == 3)
      all.back().stack = stack, all.back().spilled = stores + loads;
  });
  return all;
}

std::map<std::string, std::size_t> local_memory(std::string_view optimised) {
  std::map<std::string, std::size_t> bytes;
  for_each_line(optimised, [&](const std::string& function, const std::string& line) {
    if (line.starts_with(".local")) bytes[function] += std::stoul(line.substr(line.find('[') + 1));
  });
  return bytes;
}

}  // namespace quire::emulator
