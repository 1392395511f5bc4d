// One gradient per tensor argument: x and bias.
// refused: backward must return one gradient per Tensor, Tensor? or GradientList argument
#include "quire_torch/op/autograd.h"

namespace op = quire_torch::op;

#ifdef MISUSE
constexpr size_t kGradients = 1;
#else
constexpr size_t kGradients = 2;
#endif

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
    static constexpr auto kFields = std::tuple{op::field<&Saved::x>("x")};
  };
  static op::Tensors<1> inference(const Args& a) { return {a.x}; }
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs) { return {{a.x}, {a.x}}; }
  static op::Tensors<kGradients> backward(const Saved&, const op::Tensors<1>&, op::Needs) { return {}; }
};

void use(torch::Library& m) { op::register_outer<Op>(m); }
