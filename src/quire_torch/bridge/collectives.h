// Collectives of PyTorch's process groups, as the functional operators that graphs show (_c10d_functional). Each starts
// and returns at once; wait() gives the values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace quire_torch {

/// A process group: the name under which PyTorch knows it, the same on every rank, and how many ranks it has.
struct Group {
  std::string name;
  int64_t size = 1;
  bool operator==(const Group&) const = default;
};

/// reduction: "sum" or "max", elementwise.
at::Tensor all_reduce(const at::Tensor& t, const char* reduction, const Group& group);
/// [size * d0, ...] of each [d0, ...], in the order of ranks. One collective, and not one for each: two gathers under
/// way at once corrupt memory with gloo of PyTorch 2.13.
std::vector<at::Tensor> all_gather(const std::vector<at::Tensor>& tensors, const Group& group);
/// The values that rank `source` of the group has for t, whose sizes are the same on all of them.
at::Tensor broadcast(const at::Tensor& t, int64_t source, const Group& group);
/// This rank's [d0 / size, ...] of the sum of [d0, ...].
at::Tensor reduce_scatter(const at::Tensor& t, const Group& group);
/// Sends part r of t [size * d0, ...], which is [d0, ...], to rank r. Returns [size * d0, ...]: the parts that the
/// ranks sent to this one, in the order of ranks.
at::Tensor all_to_all(const at::Tensor& t, const Group& group);
/// The values of what `collective` of the group started.
at::Tensor wait(const at::Tensor& t, const char* collective, const Group& group);

/// Says which layer calls collectives on this thread, for errors; "" for none. A collective that fails within a named
/// layer throws c10::DistBackendError with that name, the collective and the group; elsewhere PyTorch's own error.
class Caller {
 public:
  explicit Caller(std::string layer);
  ~Caller();
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

 private:
  std::string outer_;
};

/// The layer whose operator this thread calls next, as Python says. take_next_caller() forgets it.
void set_next_caller(std::string_view layer);
std::string take_next_caller();

}  // namespace quire_torch
