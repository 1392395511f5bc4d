#include "quire_torch/ops/reduce.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include "quire/spec/buffers.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// The rows of each rank: of which it adds up the parts.
c10::SymInt rows_each(const c10::SymInt& rows, const Group& group) { return (rows + (group.size - 1)) / group.size; }

c10::SymInt rows_of_result(const std::vector<c10::SymInt>& sizes) {
  c10::SymInt rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows = rows * sizes[i];
  return rows;
}

/// Codes, scales and amaxes of a matrix, one after another as bytes.
at::Tensor packed(const at::Tensor& t, const quire::QuantSpec& spec) {
  const auto q = op::call<Quantize>({.x = t, .spec = text_of(spec)});
  return at::cat({q[0].flatten().view(at::kByte), q[1].flatten().view(at::kByte), q[2].flatten().view(at::kByte)});
}

/// The matrix [rows, columns] of which packed() made these bytes, in float32.
at::Tensor unpacked(const at::Tensor& bytes, const quire::QuantSpec& spec, const c10::SymInt& rows,
                    const c10::SymInt& columns) {
  const auto buffers = results<c10::SymInt>(spec, {rows, columns}, Direction::rowwise, /*wanted=*/true);
  DirectionBuffers q;
  c10::SymInt begin = 0;
  for (size_t i = 0; i < q.size(); ++i) {
    c10::SymInt length = static_cast<int64_t>(c10::elementSize(buffers[i].dtype));
    for (const auto& n : buffers[i].sizes) length = length * n;
    // A copy, because the bytes may not lie as the dtype wants them to.
    q[i] = bytes.narrow_symint(0, begin, length).clone().view(buffers[i].dtype).view_symint(buffers[i].sizes);
    begin = begin + length;
  }
  return op::call<Dequantize>({.data = q[0],
                               .scale = q[1],
                               .amax = q[2],
                               .spec = text_of(spec),
                               .columnwise = false,
                               .shape = {rows, columns},
                               .dtype = at::kFloat})[0];
}

}  // namespace

at::Tensor start_sum(const at::Tensor& partial, const Parallel& p) {
  if (!p.sums_float32) return p.sequence ? reduce_scatter(partial, p.group) : all_reduce(partial, "sum", p.group);
  const c10::SymInt columns = partial.sym_size(-1), rows = rows_of(partial), each = rows_each(rows, p.group);
  at::Tensor matrix = partial.reshape_symint({rows, columns}).to(at::kFloat);
  if (!p.sequence)  // where ranks add up equal numbers of rows anyway
    matrix = at::constant_pad_nd_symint(matrix, {0, 0, 0, each * p.group.size - rows});
  if (!p.sent_as) return all_to_all(matrix, p.group);
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < p.group.size; ++i)
    parts.push_back(packed(matrix.narrow_symint(0, each * i, each), *p.sent_as));
  return all_to_all(at::cat(parts), p.group);
}

at::Tensor wait_for_sum(const at::Tensor& started, const Parallel& p, const std::vector<c10::SymInt>& sizes,
                        at::ScalarType dtype, const op::OptionalTensor& bias) {
  if (!p.sums_float32) {
    const at::Tensor total = wait(started, p.sequence ? "reduce_scatter" : "all_reduce", p.group);
    return bias ? total.add(*bias).to(dtype) : total;
  }
  const at::Tensor parts = wait(started, "all_to_all", p.group);
  const c10::SymInt rows = rows_of_result(sizes), columns = sizes.back();
  const c10::SymInt each = p.sequence ? rows : rows_each(rows, p.group), length = parts.sym_size(0) / p.group.size;
  at::Tensor total;
  for (int64_t i = 0; i < p.group.size; ++i) {
    at::Tensor part = parts.narrow_symint(0, length * i, length);
    if (p.sent_as) part = unpacked(part, *p.sent_as, each, columns);
    total = i == 0 ? part : total.add(part);
  }
  if (bias) total = total.add(*bias);
  total = total.to(dtype);
  if (!p.sequence) total = gather(total, p.group).narrow_symint(0, 0, rows);
  return total.reshape_symint(sizes).contiguous();
}

}  // namespace quire_torch
