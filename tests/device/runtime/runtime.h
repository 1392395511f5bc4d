// A device that exists to find mistakes: what a CUDA runtime does, on threads of this process, with memory that the
// host cannot touch. Knows no PyTorch; backend/ makes a PyTorch device of it.
//
// Memory has two addresses. Tensors and everything above kernels hold the device address, whose pages nobody may read
// or write. Kernels get the worker address: the same bytes, mapped elsewhere. So an access of the host faults, whatever
// kernels run meanwhile.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace testdevice {

constexpr int kDevices = 2;

/// A stream. Number 0 is the device's default stream.
struct Place {
  int device = 0;
  int64_t stream = 0;
  auto operator<=>(const Place&) const = default;
};
std::string text(Place at);
/// The stream whose handle this is: its number, so that the default stream's is null, as CUDA has it.
inline Place place_of(int device, const void* stream) {
  return {device, static_cast<int64_t>(reinterpret_cast<uintptr_t>(stream))};
}

// ---- What the calling thread has chosen.
int current_device();
/// Returns the device before; a negative one changes nothing.
int exchange_device(int device);
Place current_stream(int device);
Place current_stream();
/// Makes it the current stream of its device, and returns the one before.
Place exchange_stream(Place to);
/// Streams are lent in turn, out of kPool per device.
Place next_stream(int device);

// ---- Waiting. Counted, refused in a capture, and errors of kernels are thrown here.
void synchronize(Place at);
void synchronize_device(int device);
/// What is called with the device after each wait, and may throw.
void set_after_wait(void (*after)(int device));
bool idle(Place at);
/// Every kernel of the stream sleeps first.
void set_delay(Place at, int microseconds);
/// Every kernel of all streams does.
void set_delay(int microseconds);

// ---- Launches.
using Kernel = std::function<void()>;
struct Block;
/// -1: no memory of a device.
int device_of(const void* p);
/// Whether p points into memory that is lent.
bool is_lent(const void* p);
/// What a kernel does with memory of the device.
struct Access {
  std::shared_ptr<Block> block;
  int64_t loan = 0;  ///< which one: memory is lent again and again
  bool writes = false;
};

/// One kernel. Every pointer that it uses goes through operator(), which checks it and tells where the kernel finds it:
/// const memory is read, other memory is written. The kernel holds no memory of the device itself.
class Launch {
 public:
  Launch(std::string name, Place at) : name_(std::move(name)), at_(at) {}

  /// Throws for memory of another device and for memory that was freed. Writes down memory of the host's heap, which
  /// the host may free before the kernel runs: that launch is waited for, and refused in a capture.
  template <class T>
  T* operator()(T* p) {
    return static_cast<T*>(const_cast<void*>(translate(p, !std::is_const_v<T>, at_.device)));
  }
  /// Memory of any device, which only a copy may read.
  const void* from_peer(const void* p) { return translate(p, false, device_of(p)); }
  void run(Kernel kernel) &&;

 private:
  const void* translate(const void* p, bool writes, int expected_device);

  std::string name_;
  Place at_;
  std::vector<Access> accesses_;
  bool uses_host_memory_ = false;
};

// ---- Lists: arrays of the host that are there while a kernel is launched, and no longer.
struct Flag;
/// For its lifetime, lends copies of lists to what the calling thread launches. Their pages are closed at its end, and
/// what was launched runs only then: a kernel that kept a pointer to a list is found, as "list kept", whenever it runs.
class HostLists {
 public:
  HostLists();
  ~HostLists();
  HostLists(const HostLists&) = delete;
  HostLists& operator=(const HostLists&) = delete;
  template <class T>
  std::span<const T> lend(std::span<const T> list) {
    return {static_cast<const T*>(lend(list.data(), list.size_bytes())), list.size()};
  }
  const std::shared_ptr<Flag>& gone() const { return gone_; }

 private:
  const void* lend(const void* list, size_t bytes);

  HostLists* before_;
  std::shared_ptr<Flag> gone_;
  std::vector<std::pair<char*, size_t>> lent_;
};

// ---- Events.
class Event {
 public:
  void record(Place at);
  /// What `at` gets from now on runs after what was recorded.
  void block(Place at) const;
  bool done() const;
  void synchronize() const;

 private:
  std::shared_ptr<Flag> flag_;
};

// ---- Memory, in the order of streams like PyTorch's caching allocator: freed memory is filled with 0xff on its
// stream, then lent again there. Fresh memory is 0xff too. It ends where a page ends, so that a kernel cannot run past
// it unseen.
void* allocate(size_t bytes, Place at);
void release(void* p);
/// A third address of a device's memory, where tests of the core hold it (place.cpp), and back again; other memory is
/// itself. While it is closed, which begins with it open, an access is written down as "test's address in a kernel".
void* test_address(const void* p);
void* device_address(const void* p);
void open_test_addresses(bool open);
/// The memory is used on another stream too: its own stream waits for that one before it is lent again.
void record_stream(void* p, Place at);

// ---- Capture: launches on a stream, and on those that join it by events, become a graph with memory of its own.
int64_t begin_capture(Place at);
void end_capture();
void replay(int64_t graph, Place at);
void drop_graph(int64_t graph);
bool capturing(Place at);
/// Throws while anything is captured, and spoils that capture: `what` is not allowed there.
void refuse_in_capture(const std::string& what);

// ---- What a test asks.
void count(const std::string& what);
/// Lines "WHAT\tCOUNT" since the last call.
std::string counts();
/// Mistakes since the last call: a line "KIND: DETAIL" each, then its frames, innermost first: "  SYMBOL
/// (LIBRARY+OFFSET)".
std::string violations();
/// Lists lent since the last call.
int64_t lists();
/// Kernels launched since names are kept, in order: "NAME @DEVICE/STREAM".
std::string launches(bool keep);

}  // namespace testdevice
