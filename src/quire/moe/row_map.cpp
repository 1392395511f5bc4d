#include "quire/moe/row_map.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "quire/base/check.h"
#include "quire/base/shape.h"
#include "quire/moe/route.h"

namespace quire {
namespace {

/// Rows are numbered in 32 bits. Experts whose number nobody said are fewer than this.
constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max(), kMostExperts = 1 << 16;

size_t at(int64_t i) { return static_cast<size_t>(i); }

int64_t number_of_experts(const ExpertRowsProblem& p) {
  if (!p.offsets.empty()) return std::ssize(p.offsets);
  int64_t experts = 0;
  for (const int32_t id : p.ids) experts = std::max<int64_t>(experts, id + int64_t{1});
  return std::min(experts, kMostExperts);
}

std::vector<int64_t> chunks_in_order(const ChunkRowsProblem& p) {
  const int64_t count = std::ssize(p.sizes);
  std::vector<int64_t> order(p.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (p.order.empty()) return order;
  check(p.order.size() == p.sizes.size() && std::is_permutation(p.order.begin(), p.order.end(), order.begin()),
        "chunk_rows: order must hold each of the numbers from 0 to ", count - 1, " once");
  return {p.order.begin(), p.order.end()};
}

}  // namespace

void expert_rows(const ExpertRowsProblem& p) {
  check(std::ssize(p.ids) <= kMostRows, "expert_rows: topk_ids must have fewer than 2^31 elements, got ", p.ids.size(),
        "; use fewer tokens");
  const int64_t experts = number_of_experts(p);
  std::vector<int32_t> own(p.offsets.empty() ? at(experts) : 0);
  // First how many rows an expert has, then where its next row goes, which is where they end when all have gone.
  const std::span<int32_t> ends = p.offsets.empty() ? std::span(own) : p.offsets;
  std::fill(ends.begin(), ends.end(), 0);
  for (size_t i = 0; i < p.ids.size(); ++i) {
    check_expert_id("expert_rows", p.ids[i], static_cast<int64_t>(i), experts);
    if (p.ids[i] >= 0) ++ends[at(p.ids[i])];
  }
  std::exclusive_scan(ends.begin(), ends.end(), ends.begin(), 0);
  for (size_t i = 0; i < p.ids.size(); ++i) p.row_map[i] = p.ids[i] < 0 ? -1 : ends[at(p.ids[i])]++;
}

void chunk_rows(const ChunkRowsProblem& p) {
  const int64_t rows = std::ssize(p.row_map);
  check(p.align > 0 && p.align <= kMostRows, "chunk_rows: align must be positive and less than 2^31, got ", p.align);
  int64_t total = 0;
  for (const int64_t size : p.sizes) {
    check(size >= 0 && size <= rows - total,
          "chunk_rows: sizes must not be negative and have a sum of at most the "
          "number of rows, ",
          rows, "; got ", size, " after chunks of ", total, " rows");
    total += size;
  }
  std::vector<int64_t> start(p.sizes.size());
  int64_t end = 0;
  for (const int64_t chunk : chunks_in_order(p)) {
    start[at(chunk)] = end;
    end += round_up(p.sizes[at(chunk)], p.align);
  }
  check(end + rows - total <= kMostRows, "chunk_rows: rows must be fewer than 2^31, got ", end,
        " with align=", p.align);
  int64_t row = 0;
  for (size_t chunk = 0; chunk < p.sizes.size(); ++chunk)
    for (int64_t i = 0; i < p.sizes[chunk]; ++i) p.row_map[at(row++)] = static_cast<int32_t>(start[chunk] + i);
  for (; row < rows; ++row) p.row_map[at(row)] = static_cast<int32_t>(end + row - total);
}

}  // namespace quire
