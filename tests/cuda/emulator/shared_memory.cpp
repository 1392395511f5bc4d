#include "cuda/emulator/shared_memory.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cuda/emulator/program.h"

namespace quire::emulator {
namespace {

constexpr std::byte kPoison{0xC3};

std::string place(std::size_t at) { return "byte " + std::to_string(at) + " of shared memory"; }

const char* verb(Touch touch) {
  switch (touch) {
    case Touch::read:
      return "reads";
    case Touch::write:
      return "writes";
    case Touch::atomic:
      return "atomically changes";
  }
  return "";
}

}  // namespace

void SharedMemory::start(std::size_t bytes, unsigned threads) {
  bytes_ = bytes;
  threads_ = threads;
  bytes_of_block_.assign(bytes, kPoison);
  cells_.resize(std::max(cells_.size(), bytes), Cell{0, 0, 0, 0, kNobody, kNobody, false, false});
  time_.assign(threads, 1);
  row_epoch_.assign(threads, 0);
  all_meet();
  first_epoch_ = epoch_;
}

void SharedMemory::all_meet() {
  ++epoch_;
  readers_.clear();
}

std::size_t SharedMemory::offset(uint64_t address, std::size_t bytes) const {
  const std::size_t at = static_cast<uint32_t>(address) - kSharedBegin;
  if (at >= bytes_ || bytes > bytes_ - at)
    throw Error("an address outside of the " + std::to_string(bytes_) + " bytes of shared memory");
  return at;
}

uint32_t* SharedMemory::row(unsigned thread) {
  if (seen_.size() < std::size_t{threads_} * threads_) seen_.resize(std::size_t{threads_} * threads_);
  uint32_t* begin = seen_.data() + std::size_t{thread} * threads_;
  if (row_epoch_[thread] != epoch_) std::fill_n(begin, threads_, 0u);
  row_epoch_[thread] = epoch_;
  return begin;
}

void SharedMemory::release(unsigned thread, Clock& into) {
  into.resize(threads_);
  const uint32_t* mine = row(thread);
  for (unsigned i = 0; i < threads_; ++i) into[i] = std::max(into[i], mine[i]);
  into[thread] = time_[thread]++;
}

void SharedMemory::acquire(unsigned thread, const Clock& from) {
  uint32_t* mine = row(thread);
  for (unsigned i = 0; i < threads_; ++i) mine[i] = std::max(mine[i], from[i]);
}

bool SharedMemory::seen(unsigned thread, unsigned other, uint32_t time) {
  return thread == other || (row_epoch_[thread] == epoch_ && row(thread)[other] >= time);
}

void SharedMemory::check_writer(const Cell& cell, std::size_t at, Touch touch, unsigned thread) {
  if (cell.write_epoch < first_epoch_) {
    if (touch != Touch::write)
      throw Error("a thread that " + std::string(verb(touch)) + " " + place(at) + ", which nobody has written");
    return;
  }
  if (cell.in_flight)
    throw Error("a thread that " + std::string(verb(touch)) + " " + place(at) +
                ", to which an asynchronous copy is under way");
  if (cell.write_epoch < epoch_ || (cell.atomic && touch == Touch::atomic) || seen(thread, cell.writer, cell.written))
    return;
  throw Error("a thread that " + std::string(verb(touch)) + " " + place(at) + ", which thread " +
              std::to_string(cell.writer) + " writes without a barrier in between");
}

void SharedMemory::check_readers(const Cell& cell, std::size_t at, unsigned thread) {
  if (cell.reader == kNobody || cell.read_epoch < epoch_) return;
  const auto check = [&](const Read& r) {
    if (!seen(thread, r.thread, r.time))
      throw Error("a thread that writes " + place(at) + ", which thread " + std::to_string(r.thread) +
                  " reads without a barrier in between");
  };
  if (cell.reader != kMany) return check({cell.reader, cell.read});
  for (const Read& r : readers_[cell.read]) check(r);
}

void SharedMemory::note_read(Cell& cell, unsigned thread) {
  const Read read{static_cast<uint16_t>(thread), time_[thread]};
  if (cell.reader == kNobody || cell.read_epoch < epoch_ ||
      (cell.reader != kMany && seen(thread, cell.reader, cell.read))) {
    cell.reader = read.thread;
    cell.read = read.time;
    cell.read_epoch = epoch_;
    return;
  }
  if (cell.reader != kMany) {
    readers_.push_back({{cell.reader, cell.read}});
    cell.reader = kMany;
    cell.read = static_cast<uint32_t>(readers_.size() - 1);
  }
  std::vector<Read>& all = readers_[cell.read];
  const auto mine = std::find_if(all.begin(), all.end(), [&](const Read& r) { return r.thread == read.thread; });
  if (mine == all.end())
    all.push_back(read);
  else
    *mine = read;
}

std::byte* SharedMemory::access(uint64_t address, std::size_t bytes, Touch touch, unsigned thread) {
  const std::size_t begin = offset(address, bytes);
  for (std::size_t at = begin; at < begin + bytes; ++at) {
    Cell& cell = cells_[at];
    check_writer(cell, at, touch, thread);
    if (touch == Touch::read) {
      note_read(cell, thread);
      continue;
    }
    check_readers(cell, at, thread);
    cell = {time_[thread], epoch_, 0, 0, static_cast<uint16_t>(thread), kNobody, touch == Touch::atomic, false};
  }
  return bytes_of_block_.data() + begin;
}

std::byte* SharedMemory::begin_copy(uint64_t address, std::size_t bytes, unsigned thread) {
  std::byte* to = access(address, bytes, Touch::write, thread);
  std::memset(to, static_cast<int>(kPoison), bytes);
  const std::size_t begin = offset(address, bytes);
  for (std::size_t at = begin; at < begin + bytes; ++at) cells_[at].in_flight = true;
  return to;
}

void SharedMemory::end_copy(uint64_t address, std::size_t bytes, unsigned thread) {
  const std::size_t begin = offset(address, bytes);
  for (std::size_t at = begin; at < begin + bytes; ++at)
    cells_[at] = {time_[thread], epoch_, 0, 0, static_cast<uint16_t>(thread), kNobody, false, false};
}

}  // namespace quire::emulator
