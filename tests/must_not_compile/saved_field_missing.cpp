// What a backward saves is a struct with a complete list too: an unlisted tensor would be kept without version check.
// refused: kFields must list every member of its struct
#include "quire_torch/op/autograd.h"

namespace op = quire_torch::op;

struct Op {
  static constexpr const char *kNamespace = "toy", *kName = "op";
  struct Args {
    at::Tensor x;
    bool flag;
    op::OptionalTensor bias;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::x>("x"), op::field<&Args::flag>("flag"), op::field<&Args::bias>("bias")};
  };
  static constexpr std::array kResults{"y"};
  struct Saved {
    at::Tensor x;
#ifdef MISUSE
    at::Tensor w;
#endif
    static constexpr auto kFields = std::tuple{op::field<&Saved::x>("x")};
  };
  static op::Tensors<1> inference(const Args& a) { return {a.x}; }
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs) { return {{a.x}, {.x = a.x}}; }
  static op::Tensors<2> backward(const Saved&, const op::Tensors<1>&, op::Needs) { return {}; }
};

void use(torch::Library& m) { op::register_outer<Op>(m); }
