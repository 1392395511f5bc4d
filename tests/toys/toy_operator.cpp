// The list of operators with one more: a library of its own here, a name in quire_torch/library.cpp in the tree.
#include "quire_torch/op/op.h"
#include "quire_torch/ops/halve.h"

TORCH_LIBRARY(toys, m) { quire_torch::op::register_inner<quire_torch::Halve>(m); }
