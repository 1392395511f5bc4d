// A block of threads: who runs, and what threads wait for.
#pragma once

#include <deque>
#include <random>

#include "cuda/emulator/machine.h"
#include "cuda/emulator/shared_memory.h"

namespace quire::emulator {

constexpr unsigned kWarp = 32;

/// The threads of a warp that execute a word together, by lane; null elsewhere.
struct Lanes {
  std::array<Thread*, kWarp> thread{};
  uint32_t mask = 0;

  bool has(unsigned lane) const { return lane < kWarp && (mask >> lane & 1); }
  /// Calls f(lane, thread, its instruction).
  template <class F>
  void each(F&& f) const {
    for (unsigned lane = 0; lane < kWarp; ++lane)
      if (thread[lane]) f(lane, *thread[lane], *thread[lane]->at);
  }
};

/// A word of a warp: runs when its last lane has arrived.
using Word = void (*)(const Lanes&);

/// How many threads came to a barrier, and how many with a true predicate.
struct Votes {
  uint32_t all = 0, yes = 0;
};

class Block {
 public:
  Block(const Program& program, const Launch& launch, const std::byte* parameters, Memory& memory);

  /// Runs the block at `index` of the grid; returns how many instructions ran.
  uint64_t run(Dim3 index, uint64_t seed);

  /// A thread executes a word with others of its warp. Returns where it goes on, or null.
  const Instruction* meet(Thread& thread, const Instruction& i, Word word, uint32_t mask);

  struct Arrival {
    uint32_t barrier;
    uint32_t count;  ///< of threads; 0: all
    bool waits, yes;
    void (*finish)(Thread&, const Instruction&, Votes);  ///< of each thread that waited, or null
  };
  const Instruction* arrive(Thread& thread, const Instruction& i, const Arrival& arrival);
  void end(Thread& thread);

  const Program& program;
  const Launch& launch;
  const std::byte* parameters;
  Memory& memory;
  SharedMemory shared;
  Dim3 index;

 private:
  struct Meeting {
    Word word;
    uint32_t mask, arrived;
    const Thread* first;
  };
  struct Warp {
    std::array<Thread*, kWarp> lanes{};
    uint32_t live = 0;
    std::vector<Meeting> meetings;
  };
  struct Waiting {
    Thread* thread;
    void (*finish)(Thread&, const Instruction&, Votes);
  };
  struct Barrier {
    uint32_t count = 0;
    Votes votes;
    std::vector<Waiting> waiting;
    std::vector<const Instruction*> at;  ///< of each warp that waits
    Clock seen;
  };

  void start(uint64_t seed);
  void run_some(Thread& thread);
  Thread& next();
  void go_on(Thread& thread, const Thread* current);
  bool finish(Warp& warp, std::size_t meeting, const Thread* current);
  bool finish(Barrier& barrier, const Thread* current);
  [[noreturn]] void report_deadlock() const;
  std::string where(const Thread& thread, const Instruction* i) const;

  std::vector<Thread> threads_;
  std::vector<std::unique_ptr<Thread::Stacks>> idle_;  ///< of threads that have ended
  std::vector<Warp> warps_;
  std::array<Barrier, 16> barriers_;
  std::vector<Waiting> released_;
  std::deque<Thread*> ready_;
  std::mt19937_64 dice_;
  bool shuffled_ = false;
  unsigned live_ = 0;
  uint64_t steps_ = 0;
};

}  // namespace quire::emulator
