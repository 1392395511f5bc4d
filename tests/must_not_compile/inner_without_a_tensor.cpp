// The dispatcher finds a kernel by the tensors of a call.
// refused: an operator without tensor arguments has no device
#include "quire_torch/op/op.h"

namespace op = quire_torch::op;

struct Op {
  struct Context {
    Context(at::Device, bool) {}
  };
  static constexpr const char *kNamespace = "toy", *kName = "op", *kNotDifferentiable = "has no gradient";
  struct Args {
#ifdef MISUSE
    int64_t n;
#else
    op::TensorList n;
#endif
    static constexpr auto kFields = std::tuple{op::field<&Args::n>("n")};
  };
  static constexpr std::array kResults{"y"};
  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args&) {
    return {op::absent<Int>(at::kFloat)};
  }
  static void run(const Args&, op::Tensors<1>&, const Context&) {}
};

void use(torch::Library& m) { op::register_inner<Op>(m); }
