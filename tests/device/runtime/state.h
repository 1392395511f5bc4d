// What the files of the runtime share: streams, memory, graphs and what was found, behind one lock.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "runtime.h"

namespace testdevice {

constexpr size_t kPage = 4096;
/// Address space per device; pages that nobody wrote cost nothing.
constexpr size_t kArena = size_t{1} << 34;
constexpr int64_t kPool = 16;

[[noreturn]] void fail(const std::string& what);

/// How much of each stream has happened before.
using Clock = std::map<Place, int64_t>;
void learn(Clock& clock, const Clock& other);

struct Flag {
  bool done = false, captured = false;
  Clock clock;  ///< of the stream where it was recorded
};

struct Node {
  std::string name;
  Kernel kernel;
  std::vector<Access> accesses;
  std::shared_ptr<Flag> after = nullptr;  ///< it waits for
};

struct Stream {
  std::deque<Node> queue;
  std::condition_variable wake;
  int64_t pending = 0;
  int delay = 0;
  Clock clock;
};

struct Use {
  Place at;
  int64_t tick = 0;  ///< 0: never
  std::string kernel;
};

struct Block {
  char* begin;
  size_t pages;
  size_t offset = 0;  ///< of the memory that is lent, which ends where the pages end
  Place home;
  int64_t graph = 0;  ///< whose memory it is; 0: nobody's
  bool live = false;
  int64_t loan = 0;
  std::set<Place> users = {};
  Use write = {};
  std::map<Place, Use> reads = {};

  char* lent() const { return begin + offset; }
  size_t bytes() const { return pages * kPage; }
};

struct Graph {
  std::vector<Node> nodes;
  std::set<Place> streams;
  bool failed = false;
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable finished;  ///< a kernel, an event
  std::map<Place, Stream> streams;
  std::array<int64_t, kDevices> lent_streams{};
  int delay = 0;
  Clock host;         ///< what the host has waited for
  std::string error;  ///< of a kernel, until somebody waits

  std::map<const char*, std::shared_ptr<Block>> blocks;  ///< all ever made, by their first page
  using Shelf = std::tuple<Place, int64_t, size_t>;      ///< stream, graph, pages
  std::map<Shelf, std::vector<std::shared_ptr<Block>>> free;

  int64_t lists = 0;
  size_t lists_used = 0;  ///< bytes

  std::map<int64_t, Graph> graphs;
  int64_t last_graph = 0, capture = 0;

  std::map<std::string, int64_t> counts;
  std::vector<std::string> names;
  bool keep_names = false;
};

/// The state, locked. Whoever holds it calls no function of runtime.h, except where it says so.
class Locked {
 public:
  Locked();
  Runtime* operator->() const { return &runtime_; }
  Runtime& operator*() const { return runtime_; }
  std::unique_lock<std::mutex>& lock() { return lock_; }

 private:
  Runtime& runtime_;
  std::unique_lock<std::mutex> lock_;
};

// ---- stream.cpp
Stream& stream(Runtime& r, Place at);
/// Checks the order of its accesses, then runs it behind everything of the stream. Or records it while that is
/// captured.
void submit(Runtime& r, Place at, Node node);
void enqueue(Runtime& r, Place at, Node node);
void record(Runtime& r, std::shared_ptr<Flag>& flag, Place at);
void block(Runtime& r, const std::shared_ptr<Flag>& flag, Place at);

// ---- order.cpp
/// The stream's next kernel: reports accesses that nothing orders with earlier ones on other streams.
void check_order(Runtime& r, Place at, const Node& node);

// ---- memory.cpp
char* worker_address(const void* p);
/// Kernels find memory here. All that is closed there are the pages between blocks.
bool in_worker_arena(const void* p);
bool in_test_arena(const void* p);

// ---- lists.cpp
bool in_lists(const void* p);
/// Done when the lists that the calling thread lends are gone; null if it lends none.
std::shared_ptr<Flag> lists_gone();

// ---- capture.cpp
Graph* graph_of(Runtime& r, Place at);
void refuse(Runtime& r, const std::string& what);

// ---- faults.cpp
void report(const char* kind, const char* detail);
/// Pages that a fault opened are closed again.
void close_pages();
void install_fault_handler();
void set_capturing(bool capturing);
/// Whether the host touched memory of the device since set_capturing(true).
bool touched_in_capture();
/// Kernels that faults wait for.
void change_unfinished(int64_t by);
/// The calling thread runs kernels.
void mark_worker();

}  // namespace testdevice
