#include "quire/cuda/kernels/moe.h"
#include "quire/base/shape.h"
#include "quire/cuda/launch.h"
#include "quire/cuda/rows.h"
#include "quire/spec/router.h"
#include "quire/spec/row_map.h"

namespace quire::cuda {
namespace {

constinit const Kernel kRouteAny{"route", "route_any"};
constinit const Kernel kRouteGradAny{"route", "route_grad_any"};
constinit const Kernel kRouteWarps{"route", "route_warps"};
constinit const Kernel kRouteGradWarps{"route", "route_grad_warps"};
constinit const Kernel kFindMost{"moe", "find_most"};
constinit const Kernel kCountPlaces{"moe", "count_places"};
constinit const Kernel kSumChunks{"moe", "sum_chunks"};
constinit const Kernel kStartExperts{"moe", "start_experts"};
constinit const Kernel kPlaceRows{"moe", "place_rows"};
constinit const Kernel kRankInBlock{"moe", "rank_in_block"};
constinit const Kernel kStartChunks{"moe", "start_chunks"};
constinit const Kernel kMapChunks{"moe", "map_chunks"};

constexpr int64_t kWarp = 32, kWarps = kBlockThreads / kWarp;  ///< threads, and of a block

Grid grid_of_warps(int64_t work) { return grid_of(times(work, kWarp)); }

/// Threads for tokens, and memory for each thread.
template <class Worker, class Job>
void launch_routing(const Kernel& kernel, Job job, const Context& context) {
  constexpr int64_t most = 4096;  // threads that have memory at a time
  const int64_t tokens = job.problem.logits.rows;
  if (tokens == 0) return;
  const Grid grid = grid_of(std::min(tokens, most));
  job.memory = lend<std::byte>(context, int64_t{grid.blocks} * grid.threads * Worker::bytes(job.problem));
  launch(kernel, grid, job, context);
}

void route(const RouteProblem& p, const Context& context) {
  launch_routing<Router>(kRouteAny, RouteJob{p, nullptr}, context);
}

void route_grad(const RouteGradProblem& p, const Context& context) {
  launch_routing<RouterGrad>(kRouteGradAny, RouteGradJob{p, nullptr, fault_site(context, "route_bwd")}, context);
}

/// Warps keep a token's numbers in the shared memory that every device has, and what is chosen in their lanes.
template <class Problem>
bool refuses_warp(const Problem& p, const Context&, Refusal* refusal) {
  constexpr int64_t most_bytes = 48 << 10;
  if (p.routing.topk > kWarp) return refused(refusal, "takes topk up to ", kWarp, ", but got ", p.routing.topk);
  return warp_bytes(p) * kWarps > most_bytes &&
         refused(refusal, "a token must fit into ", most_bytes / kWarps, " bytes, but takes ", warp_bytes(p));
}

template <class Job>
void launch_warps(const Kernel& kernel, const Job& job, const Context& context) {
  if (job.problem.logits.rows == 0) return;
  Grid grid = grid_of_warps(job.problem.logits.rows);
  grid.shared_bytes = static_cast<unsigned>(warp_bytes(job.problem) * kWarps);
  launch(kernel, grid, job, context);
}

void route_by_warps(const RouteProblem& p, const Context& context) {
  launch_warps(kRouteWarps, RouteJob{p, nullptr}, context);
}

void route_grad_by_warps(const RouteGradProblem& p, const Context& context) {
  launch_warps(kRouteGradWarps, RouteGradJob{p, nullptr, fault_site(context, "route_bwd")}, context);
}

RankJob job_of(const CapacityProblem& p, const Context& context) {
  RankJob job{.ids = p.ids, .count = p.count, .experts = p.num_experts, .site = fault_site(context, p.kOp)};
  job.kept = p.kept, job.capacity = p.capacity;
  return job;
}

RankJob job_of(const ExpertRowsProblem& p, const Context& context) {
  RankJob job{.ids = p.ids,
              .count = p.count,
              .experts = p.offsets ? p.num_experts : -1,
              .site = fault_site(context, "permute or tokens_per_expert (expert_rows)")};
  job.row_map = p.row_map, job.offsets = p.offsets;
  return job;
}

/// Cuts the places into at most `most` chunks of `least` places or more.
ChunkCounts cut(int64_t places, int64_t least, int64_t most) {
  const int64_t chunk = round_up(std::max(least, ceil_div(places, most)), kWarp);
  return {.chunk = chunk, .chunks = ceil_div(places, chunk)};
}

/// One block ranks all places, in the shared memory that every device has.
constexpr int64_t kBlockWarps = 8, kBlockPlaces = 1 << 13, kBlockExperts = 512;

template <class Problem>
bool refuses_block(const Problem& p, const Context&, Refusal* refusal) {
  if (p.num_experts < 1 || p.num_experts > kBlockExperts)
    return refused(refusal, "takes from 1 to ", kBlockExperts, " experts, but got ", p.num_experts);
  return p.count > kBlockPlaces && refused(refusal, "takes up to ", kBlockPlaces, " places, but got ", p.count);
}

template <class Problem>
void rank_by_block(const Problem& p, const Context& context) {
  RankJob job = job_of(p, context);
  job.of_chunks = cut(job.count, kWarp, kBlockWarps);
  launch(kRankInBlock, {.threads = kBlockWarps * kWarp, .shared_bytes = static_cast<unsigned>(block_bytes(job))}, job,
         context);
}

/// Any number of places and experts.
template <class Problem>
void rank_places(const Problem& p, const Context& context) {
  constexpr int64_t least = 128, most_chunks = 1024, most_counts = int64_t{1} << 21;
  RankJob job = job_of(p, context);
  if (job.experts < 0) {
    job.most = lend<uint32_t>(context, 1);
    fill(job.most, 0, sizeof(uint32_t), context);
    launch(kFindMost, grid_of(p.count), job, context);
  }
  const int64_t experts = job.most ? kMostExperts : job.experts;
  job.of_chunks =
      cut(job.count, least, std::clamp<int64_t>(most_counts / std::max<int64_t>(experts, 1), 1, most_chunks));
  const int64_t counts = experts * job.of_chunks.chunks;
  job.of_chunks.counts = lend<int64_t>(context, counts);
  fill(job.of_chunks.counts, 0, counts * static_cast<int64_t>(sizeof(int64_t)), context);
  const bool starts = job.row_map || job.offsets;  // the map of no place has no memory, where offsets have
  if (starts) job.starts = lend<int64_t>(context, experts);
  launch(kCountPlaces, grid_of_warps(job.of_chunks.chunks), job, context);
  constexpr int64_t likely = 1024;  // experts, where nobody said how many there are
  launch(kSumChunks, grid_of_warps(job.most ? likely : experts), job, context);
  if (starts) launch(kStartExperts, {.threads = kBlockWarps * kWarp}, job, context);
  launch(kPlaceRows, grid_of_warps(job.of_chunks.chunks), job, context);
}

void chunk_rows(const ChunkRowsProblem& p, const Context& context) {
  const int64_t count = p.sizes.count;
  const ChunkJob job{.problem = p,
                     .begins = lend<int64_t>(context, count + 1),
                     .starts = lend<int64_t>(context, count + 1),
                     .seen = lend<unsigned>(context, count),
                     .site = fault_site(context, p.kOp)};
  fill(job.seen, 0, count * static_cast<int64_t>(sizeof(unsigned)), context);
  launch(kStartChunks, {.threads = 256}, job, context);
  if (p.rows > 0) launch(kMapChunks, grid_of(p.rows), job, context);
}

}  // namespace

constinit const Rows<RouteProblem, 2> kRoute{
    {{"warp", refuses_warp<RouteProblem>, route_by_warps}, {"reference", nullptr, route}}};
constinit const Rows<RouteGradProblem, 2> kRouteGrad{
    {{"warp", refuses_warp<RouteGradProblem>, route_grad_by_warps}, {"reference", nullptr, route_grad}}};
constinit const Rows<CapacityProblem, 2> kLimitCapacity{
    {{"block", refuses_block<CapacityProblem>, rank_by_block}, {"reference", nullptr, rank_places}}};
constinit const Rows<ExpertRowsProblem, 2> kExpertRows{
    {{"block", refuses_block<ExpertRowsProblem>, rank_by_block}, {"reference", nullptr, rank_places}}};
constinit const Rows<ChunkRowsProblem> kChunkRows{{{"reference", nullptr, chunk_rows}}};

}  // namespace quire::cuda
