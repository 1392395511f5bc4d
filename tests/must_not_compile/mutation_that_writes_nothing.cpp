// Written tensors must say so in the schema, or tracing reorders and drops the call.
// refused: a mutation needs a Mutable<> argument to write
#include "quire_torch/op/op.h"

namespace op = quire_torch::op;

struct Op {
  struct Context {
    Context(at::Device, bool) {}
  };
  static constexpr const char *kNamespace = "toy", *kName = "op_";
  static constexpr auto kResults = op::kNoResults;
  struct Args {
#ifdef MISUSE
    at::Tensor state;
#else
    op::Mutable<at::Tensor> state;
#endif
    static constexpr auto kFields = std::tuple{op::field<&Args::state>("state")};
  };
  static void run(const Args&, const Context&) {}
};

void use(torch::Library& m) { op::register_mutation<Op>(m); }
