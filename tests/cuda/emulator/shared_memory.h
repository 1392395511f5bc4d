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
  std::byte* end_copy(uint64_t address, std::size_t bytes, unsigned thread);

  /// All threads wait for each other.
  void all_meet();
  /// What `thread` did comes before whatever acquires `into`.
  void release(unsigned thread, Clock& into);
  void acquire(unsigned thread, const Clock& from);

 private:
  static constexpr uint16_t kNobody = 0xFFFF, kMany = 0xFFFE;
  /// Of four bytes, or of one of them: who touched it last, at which time of that thread, in which epoch.
  struct Cell {
    uint32_t written, write_epoch, read, read_epoch;
    uint16_t writer, reader;
    bool atomic, in_flight;
  };
  struct Read {
    unsigned thread;
    uint32_t time;
  };

  std::size_t offset(uint64_t address, std::size_t bytes) const;
  template <class F>
  void each_cell(std::size_t begin, std::size_t bytes, F&& f);
  void touch(Cell& cell, std::size_t at, Touch touch, unsigned thread);
  uint32_t* row(unsigned thread);
  bool seen(unsigned thread, unsigned other, uint32_t time);
  uint32_t first_time(unsigned thread) const;
  void check_writer(const Cell& cell, std::size_t at, Touch touch, unsigned thread);
  void check_readers(const Cell& cell, std::size_t at, unsigned thread);
  void note_read(Cell& cell, unsigned thread);
  void note_one_of_many(const Cell& cell, Read read);

  std::size_t bytes_ = 0;
  unsigned threads_ = 0;
  std::size_t bitmap_ = 0;    ///< words of a bit for each thread
  uint32_t epoch_ = 0;        ///< grows when all threads meet
  uint32_t first_epoch_ = 0;  ///< of this block
  std::vector<std::byte> bytes_of_block_;
  std::vector<Cell> words_, single_bytes_;
  std::vector<uint32_t> split_;  ///< of each word the epoch in which it became four bytes
  // Of cells that many read in this epoch: a bit for each thread that read before it released anything in this epoch,
  // and lists of those that read later.
  std::vector<uint64_t> bitmaps_;
  std::vector<std::vector<Read>> late_;
  std::vector<uint32_t> time_;                        ///< of each thread
  std::vector<uint32_t> release_epoch_, first_time_;  ///< when it released last, and its time before, in that epoch
  std::vector<uint32_t> row_epoch_;                   ///< of each row of seen_
  std::vector<uint32_t> seen_;                        ///< [thread, other], within this epoch
};

}  // namespace quire::emulator
