#include "cuda/emulator/block.h"

#include <algorithm>
#include <bit>
#include <sstream>

namespace quire::emulator {
namespace {

/// Instructions of one thread before others run: it may wait in a loop for what they write.
constexpr uint64_t kTurn = 1 << 20;

std::string text_of(Dim3 d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

}  // namespace

Block::Block(const Program& of, const Launch& with, const std::byte* given, Memory& global)
    : program(of), launch(with), parameters(given), memory(global) {
  threads_.resize(std::size_t{launch.block.x} * launch.block.y * launch.block.z);
}

void Block::start(uint64_t seed) {
  dice_.seed(seed);
  shuffled_ = seed != 0;
  const auto count = static_cast<unsigned>(threads_.size());
  shared.start(program.shared_bytes() + launch.shared_bytes, count);
  warps_.assign((count + kWarp - 1) / kWarp, {});
  for (Barrier& b : barriers_) {
    b = {};
    b.at.resize(warps_.size());
  }
  ready_.clear();
  live_ = count;
  steps_ = 0;
  for (unsigned n = 0; n < count; ++n) {
    Thread& t = threads_[n];
    t.start(*this, n);
    ready_.push_back(&t);
    warps_[n / kWarp].lanes[n % kWarp] = &t;
    warps_[n / kWarp].live |= 1u << n % kWarp;
  }
}

uint64_t Block::run(Dim3 at, uint64_t seed) {
  index = at;
  start(seed);
  while (!ready_.empty()) run_some(next());
  if (live_ > 0) report_deadlock();
  return steps_;
}

Thread& Block::next() {
  if (shuffled_) std::swap(ready_.front(), ready_[dice_() % ready_.size()]);
  Thread& t = *ready_.front();
  ready_.pop_front();
  return t;
}

void Block::run_some(Thread& thread) {
  if (!thread.has_begun()) {
    thread.begin(idle_.empty() ? nullptr : std::move(idle_.back()));
    if (!idle_.empty()) idle_.pop_back();
  }
  const Instruction* i = thread.at;
  uint64_t left = kTurn;
  try {
    while (i && left) {
      --left;
      i = i->run(thread, *i);
    }
  } catch (const Error& e) {
    throw Error(e.what() + where(thread, i));
  }
  steps_ += kTurn - left;
  if (thread.ended) idle_.push_back(thread.take_stacks());
  if (!i) return;
  if (steps_ > launch.most_steps) throw Error("the kernel does not end" + where(thread, i));
  thread.at = i;
  ready_.push_back(&thread);
}

std::string Block::where(const Thread& thread, const Instruction* i) const {
  return ", at: " + thread.text(i) + ", in " + thread.function().name + ", thread " + text_of(thread.place) +
         " of block " + text_of(index);
}

void Block::go_on(Thread& thread, const Thread* current) {
  ++thread.at;
  if (&thread != current) ready_.push_back(&thread);
}

const Instruction* Block::meet(Thread& thread, const Instruction& i, Word word, uint32_t mask) {
  const unsigned lane = thread.index % kWarp;
  Warp& warp = warps_[thread.index / kWarp];
  if (!(mask >> lane & 1)) throw Error("a mask of lanes without the lane that has it");
  auto found =
      std::find_if(warp.meetings.begin(), warp.meetings.end(), [&](const Meeting& m) { return m.mask & mask; });
  if (found == warp.meetings.end()) found = warp.meetings.insert(found, {word, mask, 0, &thread});
  if (found->word != word || found->mask != mask)
    throw Error("lanes of one warp at different words or with different masks: lane " +
                std::to_string(found->first->index % kWarp) + " waits in " + found->first->text(found->first->at));
  found->arrived |= 1u << lane;
  thread.at = &i;
  return finish(warp, static_cast<std::size_t>(found - warp.meetings.begin()), &thread) ? thread.at : nullptr;
}

bool Block::finish(Warp& warp, std::size_t number, const Thread* current) {
  const Meeting meeting = warp.meetings[number];
  if (meeting.arrived != (meeting.mask & warp.live)) return false;
  warp.meetings.erase(warp.meetings.begin() + static_cast<std::ptrdiff_t>(number));
  Lanes lanes{.mask = meeting.arrived};
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if (lanes.has(lane)) lanes.thread[lane] = warp.lanes[lane];
  meeting.word(lanes);
  for (Thread* t : lanes.thread)
    if (t) go_on(*t, current);
  return true;
}

const Instruction* Block::arrive(Thread& thread, const Instruction& i, const Arrival& a) {
  if (a.barrier >= barriers_.size()) throw Error("there are 16 barriers, this is number " + std::to_string(a.barrier));
  if (a.count % kWarp != 0)
    throw Error("a barrier for " + std::to_string(a.count) + " threads, which are no whole warps");
  Barrier& b = barriers_[a.barrier];
  if (b.votes.all > 0 && b.count != a.count)
    throw Error("a barrier for " + std::to_string(a.count) + " threads, at which others wait for " +
                std::to_string(b.count));
  // All lanes of a warp come to a barrier at once.
  const Instruction*& at = b.at[thread.index / kWarp];
  if (at && at != &i) throw Error("a barrier in divergent code: lanes of one warp are at different instructions");
  at = &i;
  b.count = a.count;
  ++b.votes.all;
  b.votes.yes += a.yes;
  if (a.count != 0) shared.release(thread.index, b.seen);
  if (a.waits) b.waiting.push_back({&thread, a.finish});
  thread.at = &i;
  if (finish(b, a.waits ? &thread : nullptr)) return a.waits ? thread.at : &i + 1;
  return a.waits ? nullptr : &i + 1;
}

bool Block::finish(Barrier& b, const Thread* current) {
  if (b.votes.all == 0 || b.votes.all != (b.count ? b.count : live_)) return false;
  if (b.count == 0)
    shared.all_meet();
  else
    for (const Waiting& w : b.waiting) shared.acquire(w.thread->index, b.seen);
  const Votes votes = b.votes;
  released_.swap(b.waiting);
  b.waiting.clear();
  b.votes = {};
  b.count = 0;
  b.seen.clear();
  std::fill(b.at.begin(), b.at.end(), nullptr);
  for (const Waiting& w : released_) {
    if (w.finish) w.finish(*w.thread, *w.thread->at, votes);
    go_on(*w.thread, current);
  }
  return true;
}

void Block::end(Thread& thread) {
  thread.ended = true;
  --live_;
  if (std::any_of(thread.copies.begin(), thread.copies.end(), [](const auto& group) { return !group.empty(); }))
    throw Error("a thread that ends before its asynchronous copies");
  Warp& warp = warps_[thread.index / kWarp];
  warp.live &= ~(1u << thread.index % kWarp);
  for (std::size_t n = warp.meetings.size(); n-- > 0;) finish(warp, n, nullptr);
  for (Barrier& b : barriers_)
    if (b.count == 0) finish(b, nullptr);
}

void Block::report_deadlock() const {
  std::map<std::string, std::vector<unsigned>> waiting;
  for (const Thread& t : threads_)
    if (!t.ended) waiting[t.text(t.at)].push_back(t.index);
  std::ostringstream text;
  text << "a deadlock in " << program.kernel().name << ", block " << text_of(index) << ":";
  for (const auto& [what, who] : waiting)
    text << " " << who.size() << " threads, the first is " << who.front() << ", wait in " << what << ";";
  throw Error(text.str());
}

}  // namespace quire::emulator
