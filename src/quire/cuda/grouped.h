// What products of groups are launched with: operands and outputs whose groups have been placed and whose lists lie on
// the device.
#pragma once

#include "quire/cuda/groups.h"
#include "quire/cuda/kernels/gemm.h"

namespace quire::cuda {

inline GroupedOperand on_device(const Operand& o, const Context& context) {
  GroupedOperand g{.all = o, .each = list_on_device(o.each, context), .groups = {}};
  g.all.each = {};
  g.groups = o.each.empty()
                 ? place_groups(o.groups, o.rows(), FlatGroups{o.spec, o.direction, o.cols(), o.room, o.what}, context)
                 : place_groups(o.groups, o.rows(), context);
  return g;
}

template <class Problem>
GroupedOutput on_device(const Problem& p, const Vector& bias, const Context& context) {
  return {.all = p.out,
          .each = list_on_device(p.outs, context),
          .bias = bias,
          .biases = list_on_device(p.biases, context),
          .in_groups = p.in_groups()};
}

}  // namespace quire::cuda
