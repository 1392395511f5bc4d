#include "cuda/emulator/shared_memory.h"

#include <algorithm>
#include <bit>
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
  bitmap_ = (threads + 63) / 64;
  bytes_of_block_.assign(bytes, kPoison);
  const Cell untouched{0, 0, 0, 0, kNobody, kNobody, false, false};
  words_.resize(std::max(words_.size(), bytes / 4 + 1), untouched);
  single_bytes_.resize(4 * words_.size(), untouched);
  split_.resize(words_.size());
  time_.assign(threads, 1);
  release_epoch_.assign(threads, 0);
  first_time_.assign(threads, 0);
  row_epoch_.assign(threads, 0);
  all_meet();
  first_epoch_ = epoch_;
}

void SharedMemory::all_meet() {
  ++epoch_;
  bitmaps_.clear();
  late_.clear();
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
  if (release_epoch_[thread] != epoch_) first_time_[thread] = time_[thread];
  release_epoch_[thread] = epoch_;
  into[thread] = time_[thread]++;
}

void SharedMemory::acquire(unsigned thread, const Clock& from) {
  uint32_t* mine = row(thread);
  for (unsigned i = 0; i < threads_; ++i) mine[i] = std::max(mine[i], from[i]);
}

bool SharedMemory::seen(unsigned thread, unsigned other, uint32_t time) {
  return thread == other || (row_epoch_[thread] == epoch_ && row(thread)[other] >= time);
}

/// The time of a thread when this epoch began.
uint32_t SharedMemory::first_time(unsigned thread) const {
  return release_epoch_[thread] == epoch_ ? first_time_[thread] : time_[thread];
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
  for (std::size_t n = 0; n < bitmap_; ++n)
    for (uint64_t left = bitmaps_[cell.read + n]; left != 0; left &= left - 1) {
      const auto reader = static_cast<unsigned>(64 * n + static_cast<std::size_t>(std::countr_zero(left)));
      check({reader, first_time(reader)});
    }
  if (cell.read < late_.size())
    for (const Read& r : late_[cell.read]) check(r);
}

void SharedMemory::note_read(Cell& cell, unsigned thread) {
  const Read read{thread, time_[thread]};
  if (cell.read_epoch < epoch_ || cell.reader == kNobody ||
      (cell.reader != kMany && seen(thread, cell.reader, cell.read))) {
    cell.reader = static_cast<uint16_t>(thread);
    cell.read = read.time;
    cell.read_epoch = epoch_;
    return;
  }
  if (cell.reader != kMany) {
    const Read before{cell.reader, cell.read};
    cell.reader = kMany;
    cell.read = static_cast<uint32_t>(bitmaps_.size());
    bitmaps_.resize(bitmaps_.size() + bitmap_);
    note_one_of_many(cell, before);
  }
  note_one_of_many(cell, read);
}

void SharedMemory::note_one_of_many(const Cell& cell, Read read) {
  if (read.time == first_time(read.thread)) {
    bitmaps_[cell.read + read.thread / 64] |= uint64_t{1} << read.thread % 64;
    return;
  }
  if (late_.size() <= cell.read) late_.resize(bitmaps_.size());
  std::vector<Read>& all = late_[cell.read];
  const auto mine = std::find_if(all.begin(), all.end(), [&](const Read& r) { return r.thread == read.thread; });
  if (mine == all.end())
    all.push_back(read);
  else
    *mine = read;
}

/// Calls f(cell, the first byte of it) for whole words, and for single bytes once one of them has been touched alone.
template <class F>
void SharedMemory::each_cell(std::size_t begin, std::size_t bytes, F&& f) {
  for (std::size_t at = begin; at < begin + bytes;) {
    const std::size_t word = at / 4;
    const bool is_split = split_[word] >= first_epoch_;
    if (!is_split && at % 4 == 0 && begin + bytes - at >= 4) {
      f(words_[word], at);
      at += 4;
      continue;
    }
    if (!is_split) std::fill_n(single_bytes_.begin() + static_cast<std::ptrdiff_t>(4 * word), 4, words_[word]);
    split_[word] = std::max(split_[word], first_epoch_);
    f(single_bytes_[at], at);
    ++at;
  }
}

void SharedMemory::touch(Cell& cell, std::size_t at, Touch touch, unsigned thread) {
  check_writer(cell, at, touch, thread);
  if (touch == Touch::read) return note_read(cell, thread);
  check_readers(cell, at, thread);
  cell = {time_[thread], epoch_, 0, 0, static_cast<uint16_t>(thread), kNobody, touch == Touch::atomic, false};
}

std::byte* SharedMemory::access(uint64_t address, std::size_t bytes, Touch how, unsigned thread) {
  const std::size_t begin = offset(address, bytes);
  each_cell(begin, bytes, [&](Cell& cell, std::size_t at) { touch(cell, at, how, thread); });
  return bytes_of_block_.data() + begin;
}

std::byte* SharedMemory::begin_copy(uint64_t address, std::size_t bytes, unsigned thread) {
  std::byte* to = access(address, bytes, Touch::write, thread);
  std::memset(to, static_cast<int>(kPoison), bytes);
  each_cell(offset(address, bytes), bytes, [](Cell& cell, std::size_t) { cell.in_flight = true; });
  return to;
}

std::byte* SharedMemory::end_copy(uint64_t address, std::size_t bytes, unsigned thread) {
  const std::size_t begin = offset(address, bytes);
  each_cell(begin, bytes, [&](Cell& cell, std::size_t) {
    cell = {time_[thread], epoch_, 0, 0, static_cast<uint16_t>(thread), kNobody, false, false};
  });
  return bytes_of_block_.data() + begin;
}

}  // namespace quire::emulator
