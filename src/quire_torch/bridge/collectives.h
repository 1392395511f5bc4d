// Collectives of PyTorch's process groups, as the functional operators that graphs show (_c10d_functional). Each starts
// and returns at once; wait() gives the values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace quire_torch {

/// A process group: the name under which PyTorch knows it, the same on every rank, and how many processes it has.
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
/// This rank's [d0 / size, ...] of the sum of [d0, ...].
at::Tensor reduce_scatter(const at::Tensor& t, const Group& group);
at::Tensor wait(const at::Tensor& t);

}  // namespace quire_torch
