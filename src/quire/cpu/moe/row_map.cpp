#include "quire/cpu/moe/moe.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "quire/base/fault.h"
#include "quire/base/shape.h"
#include "quire/spec/row_map.h"

namespace quire::cpu {
namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

int64_t number_of_experts(const ExpertRowsProblem& p) {
  if (p.offsets) return p.num_experts;
  int64_t experts = 0;
  for (int64_t i = 0; i < p.count; ++i) experts = std::max<int64_t>(experts, p.ids[i] + int64_t{1});
  return std::min(experts, kMostExperts);
}

std::vector<int64_t> chunks_in_order(const ChunkRowsProblem& p) {
  const int64_t count = p.sizes.count;
  std::vector<int64_t> natural(at(count)), order;
  std::iota(natural.begin(), natural.end(), 0);
  if (p.order.count == 0) return natural;
  for (int64_t i = 0; i < p.order.count; ++i) order.push_back(p.order[i]);
  if (!std::is_permutation(order.begin(), order.end(), natural.begin(), natural.end()))
    raise("chunk_rows", ValueRule::chunk_order, {.limit = count});
  return order;
}

}  // namespace

void expert_rows(const ExpertRowsProblem& p, const Context&) {
  const int64_t experts = number_of_experts(p);
  std::vector<int32_t> own(p.offsets ? 0 : at(experts));
  // First how many rows an expert has, then where its next row goes, which is where they end when all have gone.
  const std::span<int32_t> ends = p.offsets ? std::span(p.offsets, at(experts)) : std::span(own);
  std::fill(ends.begin(), ends.end(), 0);
  for (int64_t i = 0; i < p.count; ++i) {
    check_expert_id("permute or tokens_per_expert (expert_rows)", p.ids[i], i, experts);
    if (p.ids[i] >= 0) ++ends[at(p.ids[i])];
  }
  std::exclusive_scan(ends.begin(), ends.end(), ends.begin(), 0);
  for (int64_t i = 0; i < p.count; ++i) p.row_map[i] = p.ids[i] < 0 ? -1 : ends[at(p.ids[i])]++;
}

void chunk_rows(const ChunkRowsProblem& p, const Context&) {
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < p.sizes.count; ++chunk) {
    const int64_t size = p.sizes[chunk];
    if (size < 0 || size > p.rows - total)
      raise("chunk_rows", ValueRule::chunk_size, {.index = chunk, .value = size, .limit = p.rows, .more = {total}});
    total += size;
  }
  std::vector<int64_t> start(at(p.sizes.count));
  int64_t end = 0;
  for (const int64_t chunk : chunks_in_order(p)) {
    start[at(chunk)] = end;
    end += round_up(p.sizes[chunk], p.align);
  }
  if (end + p.rows - total > kMostRows)
    raise("chunk_rows", ValueRule::chunk_rows, {.value = end, .limit = kMostRows, .more = {p.align}});
  int64_t row = 0;
  for (int64_t chunk = 0; chunk < p.sizes.count; ++chunk)
    for (int64_t i = 0; i < p.sizes[chunk]; ++i) p.row_map[row++] = static_cast<int32_t>(start[at(chunk)] + i);
  for (; row < p.rows; ++row) p.row_map[row] = static_cast<int32_t>(end + row - total);
}

}  // namespace quire::cpu
