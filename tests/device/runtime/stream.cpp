// Streams are threads that run one kernel after another.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "state.h"

namespace testdevice {
namespace {

std::atomic<void (*)(int)> after_wait{nullptr};
thread_local int the_device = 0;
thread_local std::array<int64_t, kDevices> the_streams{};

size_t index(int device) {
  if (device < 0 || device >= kDevices) fail("no device " + std::to_string(device));
  return static_cast<size_t>(device);
}

void run(Locked& r, Stream& s) {
  s.wake.wait(r.lock(), [&] { return !s.queue.empty(); });
  Node node = std::move(s.queue.front());
  s.queue.pop_front();
  if (node.after) r->finished.wait(r.lock(), [&] { return node.after->done; });
  const int delay = std::max(s.delay, r->delay);
  r.lock().unlock();
  std::string error;
  try {
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    if (node.kernel) node.kernel();
  } catch (const std::exception& e) {
    error = node.name + ": " + e.what();
  }
  node = {};  // what the kernel owns may be freed by code that asks for the lock
  r.lock().lock();
  if (r->error.empty()) r->error = error;
  --s.pending;
  change_unfinished(-1);
  r->finished.notify_all();
}

[[noreturn]] void serve(Stream& s) {
  mark_worker();
  Locked r;
  for (;;) run(r, s);
}

void wait_for(Locked& r, Place at) {
  Stream& s = stream(*r, at);
  const Clock reached = s.clock;
  r->finished.wait(r.lock(), [&] { return s.pending == 0; });
  learn(r->host, reached);
}

void throw_kernel_error(Runtime& r) {
  if (!r.error.empty()) fail("a kernel failed: " + std::exchange(r.error, {}));
}

}  // namespace

Locked::Locked()
    : runtime_([]() -> Runtime& {
        static Runtime* const r = [] {
          install_fault_handler();
          return new Runtime;  // threads of streams outlive static objects
        }();
        return *r;
      }()),
      lock_(runtime_.mutex) {
  close_pages();
}

void fail(const std::string& what) { throw std::runtime_error("test device: " + what); }
std::string text(Place at) { return std::to_string(at.device) + "/" + std::to_string(at.stream); }

int current_device() { return the_device; }
int exchange_device(int device) {
  if (device < 0) return the_device;
  index(device);
  return std::exchange(the_device, device);
}
Place current_stream(int device) { return {device, the_streams[index(device)]}; }
Place current_stream() { return current_stream(the_device); }
Place exchange_stream(Place to) { return {to.device, std::exchange(the_streams[index(to.device)], to.stream)}; }
Place next_stream(int device) {
  const Locked r;
  return {device, r->lent_streams[index(device)]++ % kPool + 1};
}

void set_after_wait(void (*after)(int device)) { after_wait = after; }
void synchronize(Place at) {
  {
    Locked r;
    refuse(*r, "synchronising a stream");
    ++r->counts["synchronize"];
    wait_for(r, at);
    throw_kernel_error(*r);
  }
  if (after_wait) after_wait.load()(at.device);
}
void synchronize_device(int device) {
  {
    Locked r;
    refuse(*r, "synchronising a device");
    ++r->counts["synchronize"];
    for (int64_t id = 0; id <= kPool; ++id)
      if (r->streams.contains({device, id})) wait_for(r, {device, id});
    throw_kernel_error(*r);
  }
  if (after_wait) after_wait.load()(device);
}
bool idle(Place at) {
  const Locked r;
  const Stream& s = stream(*r, at);
  if (s.pending == 0) learn(r->host, s.clock);
  return s.pending == 0;
}
void set_delay(Place at, int microseconds) {
  const Locked r;
  stream(*r, at).delay = microseconds;
}
void set_delay(int microseconds) {
  const Locked r;
  r->delay = microseconds;
}

Stream& stream(Runtime& r, Place at) {
  index(at.device);
  const auto [found, made] = r.streams.try_emplace(at);
  if (made) std::thread(serve, std::ref(found->second)).detach();
  return found->second;
}

void enqueue(Runtime& r, Place at, Node node) {
  Stream& s = stream(r, at);
  s.queue.push_back(std::move(node));
  ++s.pending;
  change_unfinished(1);
  s.wake.notify_one();
}

void submit(Runtime& r, Place at, Node node) {
  if (r.keep_names) r.names.push_back(node.name + " @" + text(at));
  if (Graph* graph = graph_of(r, at)) return graph->nodes.push_back(std::move(node));
  ++r.counts["launch"];
  check_order(r, at, node);
  enqueue(r, at, std::move(node));
}

void Launch::run(Kernel kernel) && {
  Locked r;
  if (uses_host_memory_) refuse(*r, "memory of the host in a launch");
  if (!graph_of(*r, at_)) refuse(*r, "launching '" + name_ + "' on stream " + text(at_) + ", which is not captured,");
  const bool now = uses_host_memory_ || graph_of(*r, at_);
  submit(*r, at_, {std::move(name_), std::move(kernel), std::move(accesses_), now ? nullptr : lists_gone()});
  if (uses_host_memory_) wait_for(r, at_);
}

void record(Runtime& r, std::shared_ptr<Flag>& flag, Place at) {
  flag = std::make_shared<Flag>();
  flag->clock = stream(r, at).clock;
  flag->captured = graph_of(r, at) != nullptr;
  if (flag->captured) return;
  enqueue(r, at,
          {"record",
           [flag] {
             const Locked locked;
             flag->done = true;
           },
           {}});
}
void block(Runtime& r, const std::shared_ptr<Flag>& flag, Place at) {
  if (!flag) return;
  if (flag->captured) {  // the stream joins the capture
    if (r.capture != 0) r.graphs.at(r.capture).streams.insert(at);
    return;
  }
  if (graph_of(r, at)) refuse(r, "waiting for an event from outside of the capture");
  learn(stream(r, at).clock, flag->clock);
  enqueue(r, at, {"wait", {}, {}, flag});
}

void Event::record(Place at) {
  const Locked r;
  testdevice::record(*r, flag_, at);
}
void Event::block(Place at) const {
  const Locked r;
  testdevice::block(*r, flag_, at);
}
bool Event::done() const {
  const Locked r;
  if (!flag_ || flag_->done) {
    if (flag_) learn(r->host, flag_->clock);
    return true;
  }
  return false;
}
void Event::synchronize() const {
  Locked r;
  refuse(*r, "synchronising an event");
  ++r->counts["synchronize"];
  if (!flag_) return;
  r->finished.wait(r.lock(), [&] { return flag_->done; });
  learn(r->host, flag_->clock);
}

}  // namespace testdevice
