// Which kernels are ordered: by their stream, by events, or because the host waited between their launches. Two kernels
// that are not, one of which writes what the other uses, are a mistake even on the day when it goes well.
#include "state.h"

namespace testdevice {
namespace {

bool happened_before(const Use& use, Place at, const Clock& clock) {
  if (use.tick == 0 || use.at == at) return true;
  const auto seen = clock.find(use.at);
  return seen != clock.end() && seen->second >= use.tick;
}

void report_race(const Use& now, const char* does, const Use& before, const char* did) {
  const std::string detail = "'" + now.kernel + "' on stream " + text(now.at) + " " + does + " what '" + before.kernel +
                             "' on stream " + text(before.at) + " " + did + "; nothing orders them";
  report("race", detail.c_str());
}

void check_access(const Access& access, const Use& now, const Clock& clock) {
  Block& b = *access.block;
  if (!happened_before(b.write, now.at, clock)) report_race(now, access.writes ? "writes" : "reads", b.write, "writes");
  if (!access.writes) {
    b.reads[now.at] = now;
    return;
  }
  for (const auto& [at, read] : b.reads)
    if (!happened_before(read, now.at, clock)) report_race(now, "writes", read, "reads");
  b.reads.clear();
  b.write = now;
}

}  // namespace

void learn(Clock& clock, const Clock& other) {
  for (const auto& [at, tick] : other) clock[at] = std::max(clock[at], tick);
}

void check_order(Runtime& r, Place at, const Node& node) {
  Clock& clock = stream(r, at).clock;
  learn(clock, r.host);
  const Use now{at, ++clock[at], node.name};
  for (const Access& access : node.accesses) check_access(access, now, clock);
}

}  // namespace testdevice
