// Graphs of launches. A replay runs them on one stream, in the order in which they were captured.
#include "state.h"

namespace testdevice {

Graph* graph_of(Runtime& r, Place at) {
  if (r.capture == 0) return nullptr;
  Graph& graph = r.graphs.at(r.capture);
  return graph.streams.contains(at) ? &graph : nullptr;
}

void refuse(Runtime& r, const std::string& what) {
  if (r.capture == 0) return;
  r.graphs.at(r.capture).failed = true;
  fail(what + " is not allowed while a stream is captured");
}
void refuse_in_capture(const std::string& what) {
  const Locked r;
  refuse(*r, what);
}

int64_t begin_capture(Place at) {
  const Locked r;
  if (r->capture != 0) fail("a capture is under way");
  if (at.stream == 0) fail("the default stream cannot be captured");
  r->capture = ++r->last_graph;
  r->graphs[r->capture].streams.insert(at);
  set_capturing(true);
  return r->capture;
}

void end_capture() {
  const Locked r;
  if (r->capture == 0) fail("nothing is captured");
  const Graph& graph = r->graphs.at(std::exchange(r->capture, 0));
  set_capturing(false);
  if (touched_in_capture()) fail("the host touched memory of the device in a capture");
  if (graph.failed) fail("the capture was spoiled by something that is not allowed there");
}

bool capturing(Place at) {
  const Locked r;
  return graph_of(*r, at) != nullptr;
}

void replay(int64_t graph, Place at) {
  const Locked r;
  const auto found = r->graphs.find(graph);
  if (found == r->graphs.end()) fail("no graph " + std::to_string(graph));
  refuse(*r, "replaying a graph");
  for (const Node& node : found->second.nodes) {
    for (const Access& use : node.accesses)
      if (use.block->graph != graph && use.block->loan != use.loan)
        fail("'" + node.name + "' of a graph uses memory that was freed since the capture");
    submit(*r, at, node);
  }
}

void drop_graph(int64_t graph) {
  Graph dropped;  // freed without the lock
  const Locked r;
  const auto found = r->graphs.find(graph);
  if (found == r->graphs.end()) return;
  dropped = std::move(found->second);
  r->graphs.erase(found);
  for (auto& [shelf, blocks] : r->free) {
    const auto& [at, owner, pages] = shelf;
    if (owner != graph) continue;
    auto& general = r->free[{at, 0, pages}];
    for (const auto& b : blocks) b->graph = 0;
    general.insert(general.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }
}

}  // namespace testdevice
