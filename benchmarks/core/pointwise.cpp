// What runs between products, 4096 x 4096 in bfloat16.
#include "quire/operations/operations.h"

#include "core/measure.h"

namespace quire::bench {
namespace {

constexpr int64_t kRows = 4096, kCols = 4096, kElements = kRows * kCols;
constexpr DType kType = DType::bf16;
constexpr int64_t kBytes = kElements * 2;

/// As many copies of some matrices of bfloat16 as are cold: inputs with values, outputs.
struct Matrices {
  Matrices(int64_t inputs, int64_t outputs, int64_t width = 1)
      : traffic{inputs * width * kBytes, outputs * kBytes}, columns(width * kCols), per_copy(inputs) {
    for (int64_t i = 0; i < copies(traffic.bytes()); ++i) {
      for (int64_t j = 0; j < inputs; ++j) in.push_back(normal_values(kType, width * kElements));
      out.emplace_back(std::max<int64_t>(1, outputs) * kBytes);
    }
  }
  Matrix input(int64_t copy, int64_t j = 0) const {
    return {in[static_cast<size_t>(copy * per_copy + j)].get(), kType, kRows, columns, columns};
  }
  MutableMatrix output(int64_t copy, int64_t cols = kCols) const {
    return {out[static_cast<size_t>(copy)].get(), kType, kRows, cols, cols};
  }

  Traffic traffic;
  int64_t columns, per_copy;
  std::vector<Memory> in, out;
};

Destination quantized(const MutableMatrix& y, std::string_view spec) {
  if (spec.empty()) return {.y = y};
  MutableMatrix absent = y;
  absent.data = nullptr;
  static const Memory scale(kElements / 4), amax(64);
  return {.y = absent,
          .spec = QuantSpec::parse(spec),
          .rowwise = {y.data, scale.get(), reinterpret_cast<float*>(amax.get())}};
}

void run_norm(benchmark::State& state, int64_t threads, NormKind kind, std::string_view spec) {
  Matrices m(1, 1);
  if (!spec.empty()) m.traffic.written = kElements;
  const Memory gamma = normal_values(kType, kCols);
  measure(state, threads, m.traffic, [&](int64_t i) {
    NormProblem p;
    p.kind = kind;
    p.x = m.input(i);
    p.gamma = {gamma.get(), kType};
    p.eps = 1e-5f;
    p.out = quantized(m.output(i), spec);
    norm(p);
  });
}

void run_norm_grad(benchmark::State& state, int64_t threads, NormKind kind) {
  const Matrices m(2, 1);
  const Memory gamma = normal_values(kType, kCols), dgamma(kCols * 2), dbeta(kCols * 2);
  const Memory mean = normal_values(DType::f32, kRows), rstd = normal_values(DType::f32, kRows);
  const bool layer = kind == NormKind::layer;
  measure(state, threads, m.traffic, [&](int64_t i) {
    norm_grad({.kind = kind,
               .dy = m.input(i, 0),
               .x = m.input(i, 1),
               .gamma = {gamma.get(), kType},
               .mean = layer ? reinterpret_cast<const float*>(mean.get()) : nullptr,
               .rstd = reinterpret_cast<const float*>(rstd.get()),
               .dx = m.output(i),
               .dgamma = dgamma.get(),
               .dbeta = layer ? dbeta.get() : nullptr});
  });
}

void run_activation(benchmark::State& state, int64_t threads, std::string_view name, std::string_view spec) {
  const Activation a = Activation::parse(name);
  Matrices m(1, 1, a.row().gated ? 2 : 1);
  if (!spec.empty()) m.traffic.written = kElements;
  measure(state, threads, m.traffic,
          [&](int64_t i) { activation({.activation = a, .x = m.input(i), .out = quantized(m.output(i), spec)}); });
}

void run_activation_grad(benchmark::State& state, int64_t threads, std::string_view name) {
  const Activation a = Activation::parse(name);
  const int64_t width = a.row().gated ? 2 : 1;
  const Matrices x(1, width, width), dy(1, 0);
  const Traffic traffic{x.traffic.read + dy.traffic.read, x.traffic.written};
  measure(state, threads, traffic, [&](int64_t i) {
    activation_grad({.activation = a, .dy = dy.input(i), .x = x.input(i), .dx = x.output(i, width * kCols)});
  });
}

void run_column_sum(benchmark::State& state, int64_t threads) {
  const Matrices m(1, 0);
  const Memory sum(kCols * 2);
  measure(state, threads, m.traffic,
          [&](int64_t i) { column_sum({.x = m.input(i), .out = sum.get(), .out_dtype = kType}); });
}

}  // namespace

void add_pointwise() {
  for (const NormKind kind : {NormKind::layer, NormKind::rms}) {
    for (const std::string_view spec : {"", "mxfp8"})
      add(std::string("norm/") + std::string(name(kind)) + "/" + (spec.empty() ? "bf16" : std::string(spec)),
          [=](benchmark::State& s, int64_t threads) { run_norm(s, threads, kind, spec); });
    add("norm_grad/" + std::string(name(kind)),
        [=](benchmark::State& s, int64_t threads) { run_norm_grad(s, threads, kind); });
  }
  for (const std::string_view activation : {"gelu", "swiglu", "srelu"}) {
    for (const std::string_view spec : {"", "mxfp8"})
      add("activation/" + std::string(activation) + "/" + (spec.empty() ? "bf16" : std::string(spec)),
          [=](benchmark::State& s, int64_t threads) { run_activation(s, threads, activation, spec); });
    add("activation_grad/" + std::string(activation),
        [=](benchmark::State& s, int64_t threads) { run_activation_grad(s, threads, activation); });
  }
  add("column_sum", run_column_sum);
}

}  // namespace quire::bench
