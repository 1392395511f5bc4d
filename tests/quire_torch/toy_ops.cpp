// Operators that exist to test quire_torch/op: every field kind, a differentiable linear with a random-stream counter,
// state, several results, text values and errors.
#include <ATen/ATen.h>

#include <cmath>
#include <stdexcept>

#include "quire_torch/op/autograd.h"

namespace toy {

namespace op = quire_torch::op;

struct Base {
  static constexpr const char* kNamespace = "toy";
  /// Nothing that a toy computes with depends on where it does.
  struct Context {
    Context(at::Device, bool) {}
  };
};

// Members without a default constructor are counted too.
struct Lists {
  at::Tensor a;
  c10::List<at::Tensor> b;
  c10::List<op::OptionalTensor> c;
  op::OptionalTensorList d;
  std::array<at::Tensor, 6> e;
  op::Mutable<at::Tensor> f;
};
static_assert(op::member_count<Lists>() == 6);

// A struct that extends another one has that one's fields first.
struct Short {
  int64_t i;
  static constexpr auto kFields = std::tuple{op::field<&Short::i>("i")};
};
struct Longer : Short {
  using Base = Short;
  at::Tensor t, u;
  static constexpr auto kFields = std::tuple{op::field<&Longer::t>("t"), op::field<&Longer::u>("u")};
};
static_assert([] {
  std::string_view names[3];
  size_t n = 0;
  op::for_each_field<Longer>([&](auto field) { names[n++] = field.name; });
  return n == 3 && names[0] == "i" && names[1] == "t" && names[2] == "u";
}());

/// A value with a canonical text: "times:F".
struct Scale {
  double factor = 1;
  static Scale parse(std::string_view text) {
    if (!text.starts_with("times:"))
      throw std::runtime_error("scale: expected times:F, got '" + std::string(text) + "'");
    return {std::stod(std::string(text.substr(6)))};
  }
  std::string text() const {
    std::string digits = std::to_string(factor);
    return "times:" + digits.substr(0, digits.find_last_not_of('0') + 1);
  }
};

// ---------------------------------------------------------------- every field kind

/// out [n, *shape] is filled with a sum over all arguments; `count` goes up by one.
struct Kinds : Base {
  static constexpr const char* kName = "kinds";
  static constexpr const char* kNotDifferentiable = "is a toy without a gradient";
  struct Args {
    op::TensorList list;
    at::Tensor x;
    op::OptionalTensor maybe;
    op::OptionalTensorList maybes;
    op::Mutable<at::Tensor> count;
    int64_t i;
    c10::SymInt n;
    std::vector<c10::SymInt> shape;
    double f;
    bool b;
    std::string s;
    at::ScalarType dtype;
    Scale scale;
    std::string group;
    op::Mutable<op::OptionalTensor> other;
    static constexpr auto kFields = std::tuple{op::field<&Args::list>("list"),
                                               op::field<&Args::x>("x"),
                                               op::field<&Args::maybe>("maybe"),
                                               op::field<&Args::maybes>("maybes"),
                                               op::field<&Args::count>("count"),
                                               op::field<&Args::i>("i"),
                                               op::field<&Args::n>("n"),
                                               op::field<&Args::shape>("shape"),
                                               op::field<&Args::f>("f"),
                                               op::field<&Args::b>("b"),
                                               op::field<&Args::s>("s"),
                                               op::field<&Args::dtype>("dtype"),
                                               op::field<&Args::scale>("scale", "\"times:2\""),
                                               op::field<&Args::group>("group", "\"\""),
                                               op::field<&Args::other>("other", "None")};
  };
  static constexpr std::array kResults{"out", "none"};

  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a) {
    op::Result<Int> out{{op::as<Int>(a.n)}, a.dtype};
    for (const c10::SymInt& size : a.shape) out.sizes.push_back(op::as<Int>(size));
    return {out, op::absent<Int>(at::kByte)};
  }
  static void run(const Args& a, op::Tensors<2>& out, const Context&) {
    double sum = static_cast<double>(a.i) + a.f + (a.b ? 1 : 0) + static_cast<double>(a.s.size() + a.group.size());
    op::for_each_tensor(a, [&](const at::Tensor& t) { sum += t.sum().item<double>(); });
    out[0].fill_(sum * a.scale.factor);
    a.count.value.add_(1);
    if (a.other.value) a.other.value->add_(2);
  }
};

/// The same through a call from C++: every field goes onto the stack and comes back.
struct KindsCalled : Kinds {
  static constexpr const char* kName = "kinds_called";
  static void run(const Args& a, op::Tensors<2>& out, const Context&) { out[0].copy_(op::call<Kinds>(a)[0]); }
};

/// An overload, and a call of it from C++.
struct KindsOverload : Kinds {
  static constexpr const char* kName = "kinds.again";
  static void run(const Args& a, op::Tensors<2>& out, const Context&) { out[0].copy_(op::call<Kinds>(a)[0]); }
};
struct KindsOverloadCalled : Kinds {
  static constexpr const char* kName = "kinds_overload_called";
  static void run(const Args& a, op::Tensors<2>& out, const Context&) { out[0].copy_(op::call<KindsOverload>(a)[0]); }
};

// ---------------------------------------------------------------- state

/// counter += 1
struct Advance : Base {
  static constexpr const char* kName = "advance_";
  static constexpr auto kResults = op::kNoResults;
  struct Args {
    op::Mutable<at::Tensor> counter;
    static constexpr auto kFields = std::tuple{op::field<&Args::counter>("counter")};
  };
  static void run(const Args& a, const Context&) { a.counter.value.add_(1); }
};

// ---------------------------------------------------------------- a linear: y = scale * x w^T + bias

/// Also packs x for the backward: [K, 16 * ceil(M / 16)], as a columnwise buffer of whole groups is.
struct LinearFwd : Base {
  static constexpr const char* kName = "linear_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call toy::linear";
  struct Args {
    at::Tensor x, w;
    op::OptionalTensor bias;
    Scale scale;
    int64_t save;  // bit 0: pack x
    static constexpr auto kFields =
        std::tuple{op::field<&Args::x>("x"), op::field<&Args::w>("w"), op::field<&Args::bias>("bias"),
                   op::field<&Args::scale>("scale"), op::field<&Args::save>("save", "0")};
  };
  static constexpr std::array kResults{"y", "packed"};

  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a) {
    const Int m = op::size<Int>(a.x, 0), k = op::size<Int>(a.x, 1);
    if (k != op::size<Int>(a.w, 1)) throw std::runtime_error("linear: x and w must agree on K");
    const auto dtype = a.x.scalar_type();
    return {op::Result<Int>{{m, op::size<Int>(a.w, 0)}, dtype},
            a.save & 1 ? op::Result<Int>{{k, (m + Int(15)) / Int(16) * Int(16)}, dtype} : op::absent<Int>(dtype)};
  }
  static void run(const Args& a, op::Tensors<2>& out, const Context&) {
    at::mm_out(out[0], a.x, a.w.t());
    out[0].mul_(a.scale.factor);
    if (a.bias) out[0].add_(*a.bias);
    if (a.save & 1) out[1].zero_().narrow(1, 0, a.x.size(0)).copy_(a.x.t());
  }
};

struct LinearBwd : Base {
  static constexpr const char* kName = "linear_bwd";
  static constexpr const char* kNotDifferentiable = "has no gradient: toy::linear is once differentiable";
  struct Args {
    at::Tensor dy, packed;
    op::OptionalTensor w;
    c10::SymInt in_features;
    Scale scale;
    int64_t needs;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::dy>("dy"),       op::field<&Args::packed>("packed"),
                   op::field<&Args::w>("w"),         op::field<&Args::in_features>("in_features"),
                   op::field<&Args::scale>("scale"), op::field<&Args::needs>("needs")};
  };
  static constexpr std::array kResults{"dx", "dw", "dbias"};

  template <class Int>
  static std::array<op::Result<Int>, 3> results(const Args& a) {
    const auto dtype = a.dy.scalar_type();
    const Int m = op::size<Int>(a.dy, 0), n = op::size<Int>(a.dy, 1), k = op::as<Int>(a.in_features);
    const auto none = op::absent<Int>(dtype);
    return {a.needs & 1 ? op::Result<Int>{{m, k}, dtype} : none, a.needs & 2 ? op::Result<Int>{{n, k}, dtype} : none,
            a.needs & 4 ? op::Result<Int>{{n}, dtype} : none};
  }
  static void run(const Args& a, op::Tensors<3>& out, const Context&) {
    if (a.scale.factor == 0) throw std::runtime_error("linear_bwd: scale 0 cannot be undone");
    const at::Tensor dy = a.dy * a.scale.factor;
    if (a.needs & 1) at::mm_out(out[0], dy, *a.w);
    if (a.needs & 2) at::mm_out(out[1], dy.t(), a.packed.narrow(1, 0, dy.size(0)).t());
    if (a.needs & 4) at::sum_out(out[2], a.dy, {0});
  }
};

struct Linear : Base {
  static constexpr const char* kName = "linear";
  struct Args {
    at::Tensor x, w;
    op::OptionalTensor bias;
    Scale scale;
    op::OptionalTensor counter;  // goes up by one per backward
    static constexpr auto kFields =
        std::tuple{op::field<&Args::x>("x"), op::field<&Args::w>("w"), op::field<&Args::bias>("bias", "None"),
                   op::field<&Args::scale>("scale", "\"times:1\""), op::field<&Args::counter>("counter", "None")};
  };
  static constexpr std::array kResults{"y"};
  static op::Tensors<1> inference(const Args& a) { return {op::call<LinearFwd>({a.x, a.w, a.bias, a.scale, 0})[0]}; }

  struct Saved {
    at::Tensor packed;
    op::OptionalTensor w;
    Scale scale;
    c10::SymInt in_features;
    op::State counter;
    static constexpr auto kFields =
        std::tuple{op::field<&Saved::packed>("packed"), op::field<&Saved::w>("w"), op::field<&Saved::scale>("scale"),
                   op::field<&Saved::in_features>("in_features"), op::field<&Saved::counter>("counter")};
  };
  static std::pair<op::Tensors<1>, Saved> forward(const Args& a, op::Needs needs) {
    auto [y, packed] = op::call<LinearFwd>({a.x, a.w, a.bias, a.scale, needs[1] ? 1 : 0});
    Saved saved{packed, {}, a.scale, a.x.sym_size(1), {}};
    if (needs[0]) saved.w = a.w;
    if (a.counter) saved.counter = {*a.counter};
    return {{y}, saved};
  }
  static op::Tensors<4> backward(const Saved& s, const op::Tensors<1>& dy, op::Needs needs) {
    if (s.counter.tensor.defined()) op::call<Advance>({{s.counter.tensor}});
    auto [dx, dw, dbias] = op::call<LinearBwd>({dy[0], s.packed, s.w, s.in_features, s.scale, needs.bits});
    return {dx, dw, dbias};
  }
};

// ---------------------------------------------------------------- several results, one of them saved, lists

struct ExpBwd : Base {
  static constexpr const char* kName = "exp_bwd";
  static constexpr const char* kNotDifferentiable = "has no gradient: toy::exp is once differentiable";
  struct Args {
    at::Tensor y;
    op::OptionalTensor dy, dz;
    op::TensorList weights;
    static constexpr auto kFields = std::tuple{op::field<&Args::y>("y"), op::field<&Args::dy>("dy"),
                                               op::field<&Args::dz>("dz"), op::field<&Args::weights>("weights")};
  };
  static constexpr std::array kResults{"dx"};
  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    const auto s = op::sizes<Int>(a.y);
    return {op::Result<Int>{{s.begin(), s.end()}, a.y.scalar_type()}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const Context&) {
    out[0].zero_();
    if (a.dy) out[0].add_(*a.dy * a.y);
    if (a.dz) out[0].add_(*a.dz, 2);
    for (const at::Tensor& w : a.weights) out[0].mul_(w);
  }
};

struct ExpFwd : Base {
  static constexpr const char* kName = "exp_fwd";
  static constexpr const char* kNotDifferentiable = "is an inner operator without a gradient; call toy::exp";
  struct Args {
    at::Tensor x;
    op::TensorList weights;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::weights>("weights")};
  };
  static constexpr std::array kResults{"y", "codes", "z"};
  template <class Int>
  static std::array<op::Result<Int>, 3> results(const Args& a) {
    const auto s = op::sizes<Int>(a.x);
    const c10::SmallVector<Int, 5> sizes(s.begin(), s.end());
    return {op::Result<Int>{sizes, a.x.scalar_type()}, op::Result<Int>{sizes, at::kByte},
            op::Result<Int>{sizes, a.x.scalar_type()}};
  }
  static void run(const Args& a, op::Tensors<3>& out, const Context&) {
    at::exp_out(out[0], a.x);
    out[1].copy_(a.x > 0);
    at::mul_out(out[2], a.x, at::scalar_tensor(2, a.x.options()));
    for (const at::Tensor& w : a.weights)
      for (size_t i : {0, 2}) out[i].mul_(w);
  }
};

/// y = e^x, codes = x > 0, z = 2x, times the (not differentiable) weights.
struct Exp : Base {
  static constexpr const char* kName = "exp";
  using Args = ExpFwd::Args;
  static constexpr auto kResults = ExpFwd::kResults;
  static op::Tensors<3> inference(const Args& a) { return op::call<ExpFwd>(a); }

  struct Saved {
    at::Tensor y;
    op::TensorList weights;
    static constexpr auto kFields = std::tuple{op::field<&Saved::y>("y"), op::field<&Saved::weights>("weights")};
  };
  static std::pair<op::Tensors<3>, Saved> forward(const Args& a, op::Needs) {
    const auto results = op::call<ExpFwd>({a.x, {}});
    if (a.weights.empty()) return {results, {results[0], {}}};
    return {op::call<ExpFwd>(a), {results[0], a.weights}};
  }
  static op::Tensors<1> backward(const Saved& s, const op::Tensors<3>& grads, op::Needs) {
    const auto arrived = [](const at::Tensor& g) { return g.defined() ? op::OptionalTensor(g) : std::nullopt; };
    TORCH_CHECK(!grads[1].defined(), "codes cannot have a gradient");
    return op::call<ExpBwd>({s.y, arrived(grads[0]), arrived(grads[2]), s.weights});
  }
};

// ---------------------------------------------------------------- plain values

struct Canonical : Base {
  static constexpr const char* kName = "canonical";
  struct Args {
    Scale scale;
    static constexpr auto kFields = std::tuple{op::field<&Args::scale>("scale")};
  };
  using Value = std::string;
  static std::string run(const Args& a) { return a.scale.text(); }
};

}  // namespace toy

TORCH_LIBRARY(toy, m) {
  namespace op = quire_torch::op;
  op::register_inner<toy::Kinds>(m);
  op::register_inner<toy::KindsCalled>(m);
  op::register_inner<toy::KindsOverload>(m);
  op::register_inner<toy::KindsOverloadCalled>(m);
  op::register_mutation<toy::Advance>(m);
  op::register_inner<toy::LinearFwd>(m);
  op::register_inner<toy::LinearBwd>(m);
  op::register_outer<toy::Linear>(m);
  op::register_inner<toy::ExpFwd>(m);
  op::register_inner<toy::ExpBwd>(m);
  op::register_outer<toy::Exp>(m);
  op::register_value<toy::Canonical>(m);
}
