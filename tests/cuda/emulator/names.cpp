#include <algorithm>

#include "cuda/emulator/builder.h"

namespace quire::emulator {
namespace {

std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words;
  std::size_t begin = 0;
  while (begin <= name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::string joined(const std::vector<std::string>& words) {
  std::string name;
  for (const std::string& word : words) name += (name.empty() ? "" : ".") + word;
  return name;
}

bool is_one_of(const std::string& word, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&](const char* w) { return word == w; });
}

/// Hints, scopes and orders of memory, and the length of vectors, which the operands tell.
bool is_hint(const std::string& word) {
  return word.starts_with("L1::") || word.starts_with("L2::") ||
         is_one_of(word, {"nc",  "volatile", "weak",    "relaxed", "acquire", "release", "acq_rel", "cta",
                          "gpu", "sys",      "cluster", "mmio",    "ca",      "cg",      "cs",      "cv",
                          "lu",  "wb",       "wt",      "v2",      "v4",      "v8"});
}

}  // namespace

std::string plain_name(const std::string& name) {
  std::vector<std::string> words = words_of(name);
  const std::string head = words[0];
  if (is_one_of(head, {"ld", "st", "atom", "red", "isspacep", "cvta"})) {
    std::erase_if(words, is_hint);
    for (std::string& word : words) word = word.substr(0, word.find("::"));
    if (head == "red") words[0] = "atom";
  }
  if (head == "cp" || head == "ldmatrix") {
    std::erase_if(words, [](const std::string& w) { return w.starts_with("L2::"); });
    for (std::string& word : words) word = word.substr(0, word.find("::"));
  }
  if (head == "barrier" || head == "bar") {
    words[0] = "bar";
    std::erase_if(words, [](const std::string& w) { return w == "cta" || w == "aligned"; });
  }
  const bool orders =
      head == "fence" && words.size() > 1 && is_one_of(words[1], {"sc", "acq_rel", "acquire", "release"});
  if (orders || is_one_of(head, {"membar", "prefetch", "prefetchu", "griddepcontrol", "nanosleep"}))
    return head == "prefetchu" ? "prefetch" : head;
  return joined(words);
}

std::string reason_to_refuse(const std::string& name) {
  const std::vector<std::string> words = words_of(name);
  const auto has = [&](const char* word) { return std::find(words.begin(), words.end(), word) != words.end(); };
  if (has("approx") || has("full")) return "an operation that is not exact, whose result depends on the chip";
  if (has("ftz")) return "an operation that takes subnormal numbers for 0";
  const bool is_float = is_one_of(words.back(), {"f32", "f64", "f16", "f16x2", "bf16", "bf16x2"});
  if (is_one_of(words[0], {"add", "sub", "mul"}) && is_float)
    return "an operation that may become part of a fused one; nvcc's option -fmad=false, or an intrinsic that rounds, "
           "keeps it";
  if (words[0] == "trap") return "a trap, which may be what is left of a read from null";
  return "an operation that the emulator does not know";
}

}  // namespace quire::emulator
