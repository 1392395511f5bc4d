// Benchmarks of the core: kernels as a ratio to memcpy, which runs in turns with them. Arguments are those of Google
// Benchmark, and --threads=1,2 and --hot (the same memory in every run). --benchmark_filter=REGEX chooses,
// --benchmark_out=FILE writes JSON.
#include <cstring>
#include <sstream>
#include <string>

#include "core/measure.h"
#include "quire/cpu/isa.h"

namespace quire::bench {
namespace {

/// Takes quire's own options out of the arguments.
int parse_options(int count, char** arguments) {
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    const std::string text = arguments[i];
    if (text == "--hot") {
      options().cold = false;
    } else if (text.starts_with("--threads=")) {
      options().threads.clear();
      std::istringstream list(text.substr(std::strlen("--threads=")));
      for (std::string number; std::getline(list, number, ',');) options().threads.push_back(std::stol(number));
    } else {
      arguments[kept++] = arguments[i];
    }
  }
  return kept;
}

}  // namespace
}  // namespace quire::bench

int main(int count, char** arguments) {
  using namespace quire::bench;
  count = parse_options(count, arguments);
  // Columns for counters, unless the caller wants them otherwise.
  std::vector<char*> all(arguments, arguments + count);
  std::string tabular = "--benchmark_counters_tabular=true";
  all.insert(all.begin() + 1, tabular.data());
  count = static_cast<int>(all.size());
  benchmark::Initialize(&count, all.data());
  if (benchmark::ReportUnrecognizedArguments(count, all.data())) return 1;
  benchmark::AddCustomContext("isa", std::string(quire::cpu::active().name));
  add_machine();
  add_quantize();
  add_dequantize();
  add_pointwise();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
