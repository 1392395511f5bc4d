#include "quire/cuda/self_check.h"

#include <algorithm>
#include <atomic>

#include "quire/base/env.h"
#include "quire/spec/fingerprint_rule.h"

namespace quire::cuda {
namespace {

enum class Setting : uint8_t { unread, on, off };
std::atomic<Setting> setting{Setting::unread};

bool wanted() {
  const Setting now = setting.load(std::memory_order_relaxed);
  if (now != Setting::unread) [[likely]]
    return now == Setting::on;
  const std::string& text = env::self_check();
  check(text.empty() || text == "off", "QUIRE_SELF_CHECK is '", text, "'; it may be off, or not set");
  Setting expected = Setting::unread;
  setting.compare_exchange_strong(expected, text.empty() ? Setting::on : Setting::off);
  return setting == Setting::on;
}

/// Answers: in a word, the upper bits of a question's key, and 1 + how many results differ, as far as it can count. 0:
/// nothing. A question has the first of the words from its place on that is its own or nothing.
constexpr size_t kWords = 1 << 12;
constexpr uint64_t kCount = (1 << 24) - 1;
std::array<std::atomic<uint64_t>, kWords> answers{};

/// The word of a question; the last one that was looked at if there is neither its own nor an empty one.
std::atomic<uint64_t>& answer_to(detail::Question question) {
  constexpr size_t most = 64;
  std::atomic<uint64_t>* word = nullptr;
  for (size_t i = 0; i < most; ++i) {
    word = &answers[(question.key + i) % kWords];
    const uint64_t now = word->load(std::memory_order_acquire);
    if (now == 0 || (now & ~kCount) == (question.key & ~kCount)) break;
  }
  return *word;
}

}  // namespace

bool set_self_check(bool on) {
  const bool before = wanted();
  setting = on ? Setting::on : Setting::off;
  return before;
}

namespace detail {

Question::Question(const void* row, uint64_t kind, const Context& context)
    : key(mixed(mixed(kind, reinterpret_cast<uintptr_t>(row)), static_cast<uint64_t>(context.index))) {}

Verdict verdict_of(Question question) {
  const uint64_t word = answer_to(question).load(std::memory_order_acquire);
  if ((word & ~kCount) != (question.key & ~kCount) || (word & kCount) == 0) return {};
  return {.known = true, .differing = static_cast<uint32_t>((word & kCount) - 1)};
}

bool may_ask(const Context& context) { return !context.capturing && context.workspace && wanted(); }

bool keep(Question question, uint32_t differing) {
  std::atomic<uint64_t>& word = answer_to(question);
  uint64_t nothing = 0;
  return word.compare_exchange_strong(nothing,
                                      (question.key & ~kCount) | std::min<uint64_t>(uint64_t{differing} + 1, kCount));
}

}  // namespace detail
}  // namespace quire::cuda
