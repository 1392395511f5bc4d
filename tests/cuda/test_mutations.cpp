// Each change of one instruction of a kernel is noticed by the tests of that kernel, which run in a process of their
// own.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>

#include "cuda/many_cases.h"
#include "cuda/mutation.h"
#include "cuda/ptx_files.h"

namespace quire::testing {
namespace {

/// Whether the tests of a filter pass with `text` instead of the PTX file `name`. Those that do not end do not pass.
bool pass(const std::string& name, const std::string& text, const std::string& filter) {
  const auto path = std::filesystem::temp_directory_path() / ("quire_mutant_" + std::to_string(getpid()) + ".ptx");
  std::ofstream(path) << text;
  const std::string instead = name + "=" + path.string(), argument = "--gtest_filter=" + filter;
  std::fflush(nullptr);  // or the child would write it too
  const pid_t child = fork();
  if (child == 0) {
    setenv("QUIRE_PTX_INSTEAD", instead.c_str(), 1);
    // All tests of the filter, not those of this process's part.
    unsetenv("GTEST_TOTAL_SHARDS"), unsetenv("GTEST_SHARD_INDEX");
    if (!std::freopen("/dev/null", "w", stdout) || !std::freopen("/dev/null", "w", stderr)) _exit(99);
    alarm(20);
    execl("/proc/self/exe", "test_cuda", argument.c_str(), "--gtest_fail_fast", static_cast<char*>(nullptr));
    _exit(99);
  }
  int status = 0;
  waitpid(child, &status, 0);
  std::filesystem::remove(path);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

struct Subject {
  const char* file;
  const char* filter;
  std::vector<std::string> kinds;
  std::vector<std::string> functions;  ///< none: all
};

const std::vector<Subject>& subjects() {
  static const std::vector<Subject> all{
      {"features.ptx", "Orders/Features.*:Orders.*", {"barrier", "shuffle", "index"}, {}},
      {"tensor.ptx", "Orders/Tensor.Products*", {"barrier", "index", "swap"}, {"product_of_bf16", "product_of_e4m3"}},
      {"kernels.ptx",
       "Functions.*:Quantizers.AKernel*",
       {"index"},
       {"reorder", "curves", "convert", "update_delayed", "quantize_mxfp8", "quantize_nvfp4_rht_sr_swizzled"}},
      {"decode.ptx", "TensorProducts.OfEachKind*", {"barrier", "index", "matrix"}, {"decode_64"}},
      {"pipelined_codes.ptx", "TensorProducts.OfEachKind*:TensorProducts.OfMoreTiles*", {"barrier"}, {"codes_128"}},
      {"bf16_lines.ptx", "TensorProducts.OfEachKind*:TensorProducts.OfMoreTiles*", {"barrier"}, {"decode_operand"}},
      {"exact.ptx", "TensorProducts.OfFourBit*", {"barrier", "index", "matrix"}, {"exact_16"}},
      {"plain_tiles.ptx", "PlainProducts.OfAWholeTile*", {"barrier", "index", "matrix"}, {"plain_bf16_64"}},
      {"pipelined_bf16.ptx", "Pipelined.WholeTiles*", {"barrier", "matrix"}, {"plain_bf16_128_along"}},
      {"skinny.ptx",
       "Skinny.OfPlainRows*:Skinny.OfGroups*",
       {"barrier", "index"},
       {"skinny_two_level_16", "skinny_f32_64"}},
      {"skinny_rows.ptx", "Skinny.OfGroups*", {"index"}, {}},
      {"plain_few_rows.ptx", "PlainProducts.OfFewRows*", {"barrier", "index"}, {"plain_few_bf16_4"}},
      {"dequantize_vector.ptx", "Dequantize.VectorsTakeLines*:Dequantize.VectorsTakeGroups*", {"index"}, {}},
      {"permute_vector.ptx", "CudaRows.MoveAnd*", {"shuffle"}, {}},
      {"state.ptx", "CudaState.StepsOfDelayedScalingRoll*", {"index"}, {"end_steps"}},
  };
  return all;
}

/// What a test need not notice, with the reason.
bool changes_nothing(const Mutant& m) {
  // It shows that nobody waits at the other barrier, and orders nothing.
  if (m.function == "arrives_and_goes_on" && m.before.find("bar.sync 2") != std::string::npos) return true;
  // Numbers of the product itself, such as an option of a spec, which these few products may not tell from its
  // neighbour or may not need. Products of every spec do, and take too long for each mutant. Scales are loaded as
  // float32.
  const auto has = [&](const char* part) { return m.before.find(part) != std::string::npos; };
  const bool of_product = m.function == "decode_64" || m.function == "decode_operand" || m.function == "exact_16" ||
                          m.function.starts_with("plain_") || m.function.starts_with("skinny_");
  return of_product && (has("6memory+") || (has("ld.shared.") && !has(".f32")));
}

/// Mutants of a kind, at most so many, at random places.
std::vector<Mutant> some_mutants(const Subject& subject, const std::string& kind, std::size_t most) {
  std::vector<Mutant> mutants = mutants_of(ptx_of(subject.file));
  std::erase_if(mutants, [&](const Mutant& m) {
    const auto& f = subject.functions;
    return m.kind != kind || changes_nothing(m) || (!f.empty() && std::find(f.begin(), f.end(), m.function) == f.end());
  });
  std::shuffle(mutants.begin(), mutants.end(), std::mt19937(1));
  mutants.resize(std::min(mutants.size(), most));
  return mutants;
}

std::size_t most_mutants() { return many_cases() ? 100000 : 3; }

TEST(Mutations, EachIsNoticedWhereTestsComeToIt) {
  for (const Subject& s : subjects()) {
    const std::string ptx = ptx_of(s.file);
    ASSERT_TRUE(pass(s.file, ptx, s.filter)) << s.file << " as it is";
    for (const std::string& kind : s.kinds) {
      const std::vector<Mutant> mutants = some_mutants(s, kind, most_mutants());
      EXPECT_FALSE(mutants.empty()) << s.file << ", " << kind;
      std::size_t not_reached = 0;
      for (const Mutant& m : mutants) {
        if (!pass(s.file, mutated(ptx, m), s.filter)) continue;
        // A trap in its place tells whether any test comes there.
        Mutant trap = m;
        trap.after = "\ttrap;", trap.other_after.clear();
        const bool reached = !pass(s.file, mutated(ptx, trap), s.filter);
        not_reached += !reached;
        EXPECT_FALSE(reached) << m.text();
      }
      std::cout << s.file << ", " << kind << ": " << mutants.size() << " mutants, of which tests do not reach "
                << not_reached << std::endl;
    }
  }
}

TEST(Mutations, EachKindIsFoundAndChangesItsLineAlone) {
  const std::string ptx =
      ".visible .entry k(\n)\n{\n\tld.shared.u32 \t%r1, [%r9];\n\tld.shared.u32 \t%r2, [%r9+8];\n\tbar.sync \t0;\n"
      "\tshfl.sync.bfly.b32 \t%r3|%p1, %r1, 4, 31, -1;\n\tadd.s32 \t%r4, %r3, 7;\n\tsetp.lt.s32 \t%p2, %r4, %r2;\n"
      "\t@%p2 st.global.u16 \t[%rd1+2], %rs1;\n}\n";
  const std::pair<const char*, const char*> expected[] = {
      {"index", "ld.shared.u32 \t%r1, [%r9+4];"},
      {"index", "ld.shared.u32 \t%r2, [%r9+12];"},
      {"swap", "ld.shared.u32 \t%r1, [%r9+8];"},
      {"barrier", ""},
      {"shuffle", "shfl.sync.bfly.b32 \t%r3|%p1, %r1, 5, 31, -1;"},
      {"constant", "add.s32 \t%r4, %r3, 8;"},
      {"operation", "sub.s32 \t%r4, %r3, 7;"},
      {"comparison", "setp.le.s32 \t%p2, %r4, %r2;"},
      {"index", "@%p2 st.global.u16 \t[%rd1+4], %rs1;"},
  };
  const std::vector<Mutant> found = mutants_of(ptx);
  ASSERT_EQ(found.size(), std::size(expected));
  for (std::size_t n = 0; n < found.size(); ++n) {
    EXPECT_EQ(found[n].kind, expected[n].first);
    EXPECT_EQ(found[n].function, "k");
    EXPECT_NE(found[n].after.find(expected[n].second), std::string::npos) << found[n].text();
    const std::string changed = mutated(ptx, found[n]);
    EXPECT_NE(changed, ptx);
    EXPECT_EQ(std::count(changed.begin(), changed.end(), '\n'), std::count(ptx.begin(), ptx.end(), '\n'));
  }
}

}  // namespace
}  // namespace quire::testing
