// What kernels of products share: the problem of each group, and codes as float32.
#pragma once

#include "quire/cuda/kernels/fault.cuh"
#include "quire/cuda/kernels/gemm.h"
#include "quire/cuda/kernels/groups.cuh"
#include "quire/cuda/kernels/threads.cuh"
#include "quire/spec/product.h"

namespace quire::cuda {

/// A group of an operand.
__device__ inline Operand operand_of(const GroupedOperand& g, int64_t e, const GroupPlace& place) {
  Operand o = g.all;
  if (o.direction == Direction::rowwise)
    o.outer = place.rows;
  else
    o.contraction = columnwise_tokens(o.spec, place.rows);
  if (g.each) {
    const Side side = g.each[e];
    o.data = side.data, o.scale = side.scale, o.amax = side.amax;
  } else {
    o.data = static_cast<const uint8_t*>(o.data) + place.at[0];
    o.scale = static_cast<const uint8_t*>(o.scale) + place.at[1] * (has_byte_scales(o.spec) ? 1 : 4);
    if (o.amax) o.amax += place.at[2];
  }
  return o;
}

/// The output of a group that has `place` of the rows, whose product has `rows` rows and as many columns as all have.
__device__ inline ProductOutput output_of(const GroupedOutput& g, int64_t e, const GroupPlace& place, int64_t rows) {
  ProductOutput to{g.all, g.bias, g.addend};
  if (!g.in_groups) return to;
  to.out = g.each ? g.each[e] : matrix_of(g.all, GroupPlace{g.by_rows ? place.begin : e * rows, rows, {}});
  if (g.biases)
    to.bias = g.biases[e];
  else if (g.bias.data)
    to.bias.data = static_cast<const char*>(g.bias.data) + e * g.all.cols * size_of(g.bias.dtype);
  if (g.addend) to.addend = to.out.data;
  return to;
}

/// One product of a GemmJob.
struct OneProduct {
  OperandValues a, b;
  ProductOutput to;
};

/// Groups end elsewhere in b than in a.
__device__ inline void report_contraction(const GemmJob& job, int64_t a, int64_t b) {
  const Operand& of = job.b.all;
  const bool columnwise = of.direction == Direction::columnwise;
  report(
      job.contraction, ValueRule::group_room,
      {.value = b,
       .limit = a,
       .more = {job.b.groups.count, columnwise ? of.contraction : of.outer, columnwise ? of.outer : of.contraction}});
}

/// Calls each(product) for the groups of this block. Outputs of groups that contract nothing are zeroed, by each thread
/// of the block's row.
template <class Each>
__device__ void each_product(const GemmJob& job, Each&& each) {
  each_group(job.a.groups, [&](int64_t e, const GroupPlace& place) {
    const Operand a = operand_of(job.a, e, place), b = operand_of(job.b, e, job.b.groups[e]);
    const ProductOutput to = output_of(job.out, e, place, a.outer);
    if (job.out.in_groups && place.rows == 0) {
      if (job.out.by_rows || job.out.addend) return;
      each_of(to.out.rows * to.out.cols, [&](int64_t i) {
        store_element(to.out.data, to.out.dtype, i / to.out.cols * to.out.row_stride + i % to.out.cols, 0.0f);
      });
      return;
    }
    if (a.contraction != b.contraction) {
      if (thread() == 0) report_contraction(job, a.contraction, b.contraction);
      return;
    }
    each(OneProduct{OperandValues(a), OperandValues(b), to});
  });
}

}  // namespace quire::cuda
