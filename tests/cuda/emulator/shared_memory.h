// The shared memory of a block: which thread has written and read each byte, and what is ordered before what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire::emulator {

/// Of each thread how much of it is known to be over.
using Clock = std::vector<uint32_t>;

enum class Touch : uint8_t { read, write, atomic };

/// An access that is not ordered after another thread's is an error, in whatever order threads run.
class SharedMemory {
 public:
  void start(std::size_t bytes, unsigned threads);

  /// The bytes at an offset of shared memory, of which `thread` does this.
  std::byte* access(uint64_t address, std::size_t bytes, Touch touch, unsigned thread);
  /// Of an asynchronous copy: whoever touches the bytes before it ends is in error.
  std::byte* begin_copy(uint64_t address, std::size_t bytes, unsigned thread);
  void end_copy(uint64_t address, std::size_t bytes, unsigned thread);

  /// All threads wait for each other.
  void all_meet();
  /// What `thread` did comes before whatever acquires `into`.
  void release(unsigned thread, Clock& into);
  void acquire(unsigned thread, const Clock& from);

 private:
  static constexpr uint16_t kNobody = 0xFFFF, kMany = 0xFFFE;
  struct Cell {
    uint32_t written, write_epoch, read, read_epoch;
    uint16_t writer, reader;
    bool atomic, in_flight;
  };
  struct Read {
    uint16_t thread;
    uint32_t time;
  };

  std::size_t offset(uint64_t address, std::size_t bytes) const;
  uint32_t* row(unsigned thread);
  bool seen(unsigned thread, unsigned other, uint32_t time);
  void check_writer(const Cell& cell, std::size_t at, Touch touch, unsigned thread);
  void check_readers(const Cell& cell, std::size_t at, unsigned thread);
  void note_read(Cell& cell, unsigned thread);

  std::size_t bytes_ = 0;
  unsigned threads_ = 0;
  uint32_t epoch_ = 0;        ///< grows when all threads meet
  uint32_t first_epoch_ = 0;  ///< of this block
  std::vector<std::byte> bytes_of_block_;
  std::vector<Cell> cells_;
  std::vector<std::vector<Read>> readers_;  ///< of cells that many read in this epoch
  std::vector<uint32_t> time_;              ///< of each thread
  std::vector<uint32_t> row_epoch_;         ///< of each row of seen_
  std::vector<uint32_t> seen_;              ///< [thread, other], within this epoch
};

}  // namespace quire::emulator
