// Schemas know double, not float.
// refused: an operator has no field of this type
#include "quire_torch/op/fields.h"

namespace op = quire_torch::op;

struct Scaled {
  static constexpr const char* kName = "scaled";
  struct Args {
    at::Tensor x;
#ifdef MISUSE
    float eps;
#else
    double eps;
#endif
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::eps>("eps")};
  };
};

Scaled::Args use(op::Stack& stack) { return op::unbox<Scaled>(stack); }
