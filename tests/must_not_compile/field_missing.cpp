// A member that kFields does not list would silently keep its default. Members without a default constructor count too.
// refused: kFields must list every member of its struct
#include "quire_torch/op/fields.h"

namespace op = quire_torch::op;

struct Args {
  at::Tensor x;
  op::OptionalTensor bias;
  c10::List<at::Tensor> buffers;
  std::string spec;
#ifdef MISUSE
  bool forgotten;
#endif
  static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::bias>("bias"),
                                             op::field<&Args::buffers>("buffers"), op::field<&Args::spec>("spec")};
};

void use(Args& args) {
  op::for_each_tensor(args, [](at::Tensor& t) { t.reset(); });
}
