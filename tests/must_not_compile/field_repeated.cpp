// A member listed twice hides one that is missing: the count is right.
// refused: kFields must list every member only once
#include "quire_torch/op/fields.h"

namespace op = quire_torch::op;

struct Args {
  at::Tensor x, w;
#ifdef MISUSE
  static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::x>("w")};
#else
  static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::w>("w")};
#endif
};

void use(Args& args) {
  op::for_each_tensor(args, [](at::Tensor& t) { t.reset(); });
}
