#include "quire_torch/ops/register_runner.h"

#include <span>

#include "quire/runner/linear_runner.h"
#include "quire/runner/moe_runner.h"
#include "quire/runner/registry.h"
#include "quire_torch/ops/operand.h"
#include "quire_torch/ops/tensor_runner.h"

namespace quire_torch {
namespace {

using quire::PreparedWeight, quire::check;

/// A stack of weights as the operators get them.
struct Weights {
  const char* what;  ///< for errors: "runner: w13"
  const op::TensorList& tensors;
  const quire::QuantSpec& spec;
  int64_t count, n, k;
  at::Tensor bias;  ///< undefined, or [count, n]
};

Weights weights(const char* what, const op::TensorList& tensors, const quire::QuantSpec& spec,
                const std::vector<c10::SymInt>& shape) {
  check(shape.size() == 3, what, " must have the shape of a stack, {E, N, K}, got ", shape.size(), " sizes");
  return {what, tensors, spec, op::as<int64_t>(shape[0]), op::as<int64_t>(shape[1]), op::as<int64_t>(shape[2]), {}};
}

Weights with_bias(Weights w, const std::optional<at::Tensor>& bias) {
  if (!bias) return w;
  check_input(*bias, w.what);
  check(bias->numel() == w.count * w.n && bias->size(-1) == w.n && bias->device().is_cpu(), w.what,
        "'s bias must have ", w.n, " features for each of ", w.count, " on the CPU, got ", bias->sizes(), " on ",
        bias->device());
  w.bias = bias->contiguous();
  return w;
}

quire::Vector bias_of(const Weights& w, int64_t i) {
  if (!w.bias.defined()) return {};
  const quire::DType t = dtype(w.bias.scalar_type(), w.what);
  return {static_cast<const char*>(w.bias.const_data_ptr()) + i * w.n * size_of(t), t};
}

/// The i-th of a float tensor [E, N, K].
PreparedWeight quantized(const Weights& w, int64_t i) {
  const at::Tensor& all = w.tensors[0];
  check_input(all, w.what);
  check(all.sizes() == at::IntArrayRef({w.count, w.n, w.k}), w.what, " must be [", w.count, ", ", w.n, ", ", w.k,
        "], got ", all.sizes());
  const at::Tensor one = all[i];
  const MatrixView view(one, w.what);
  return {view.matrix(), w.spec, bias_of(w, i)};
}

/// The i-th of given buffers.
PreparedWeight copied(const Weights& w, int64_t i) {
  const size_t at = static_cast<size_t>(3 * i);
  const BufferTensors b{w.tensors[at], w.tensors[at + 1], w.tensors[at + 2]};
  check_buffers(b, w.spec, {w.n, w.k}, quire::Direction::rowwise, w.what);
  return PreparedWeight(operand(b, w.spec, quire::Direction::rowwise, w.n, w.k), bias_of(w, i));
}

std::vector<PreparedWeight> prepared(const Weights& w) {
  check(w.count >= 1 && (w.tensors.size() == 1 || w.tensors.size() == static_cast<size_t>(3 * w.count)), w.what,
        " must be one tensor, or three rowwise buffers for each of ", w.count, ", got ", w.tensors.size());
  for (const at::Tensor& t : w.tensors)
    check(t.device().is_cpu(), w.what, " must be on the CPU, got ", t.device(), "; move it with .cpu()");
  std::vector<PreparedWeight> out;
  for (int64_t i = 0; i < w.count; ++i) out.push_back(w.tensors.size() == 1 ? quantized(w, i) : copied(w, i));
  return out;
}

}  // namespace

int64_t RegisterLinearRunner::run(const Args& a) {
  std::vector<PreparedWeight> w = prepared(with_bias(weights("runner: weight", a.weight, *a.w, a.shape), a.bias));
  check(w.size() == 1, "runner: a linear runner has one weight, got ", w.size());
  return quire::register_runner(std::make_shared<quire::LinearRunner>(std::move(w[0]), *a.x), a.name);
}

int64_t RegisterMoeRunner::run(const Args& a) {
  auto w13 = prepared(with_bias(weights("runner: w13", a.w13, *a.w, a.w13_shape), a.w13_bias));
  auto w2 = prepared(with_bias(weights("runner: w2", a.w2, *a.w, a.w2_shape), a.w2_bias));
  check(w13.size() == w2.size(), "runner: w13 and w2 must have as many experts, got ", w13.size(), " and ", w2.size());
  std::vector<quire::Expert> experts;
  for (size_t i = 0; i < w13.size(); ++i) experts.push_back({std::move(w13[i]), std::move(w2[i])});
  const quire::MoeOptions options{.x = *a.x, .activation = *a.activation, .weight_on_input = a.weight_on_input};
  return quire::register_runner(std::make_shared<quire::MoeRunner>(std::move(experts), options), a.name);
}

int64_t RegisterPythonRunner::run(const Args& a) {
  quire::RunnerInfo info{.kind = a.experts == 0 ? quire::RunnerKind::linear : quire::RunnerKind::moe,
                         .device = a.device,
                         .in_features = a.in_features,
                         .out_features = a.out_features,
                         .experts = a.experts,
                         .description = a.description};
  return quire::register_runner(std::make_shared<PythonRunner>(std::move(info), a.function), a.name);
}

std::string list_runners() {
  std::string lines;
  for (const quire::RegisteredRunnerPtr& r : quire::registered_runners()) {
    const quire::RunnerInfo& i = r->runner->info();
    lines += quire::text(r->handle, "\t", r->name, "\t", name(i.kind), "\t", i.device, "\t", i.in_features, "\t",
                         i.out_features, "\t", i.experts, "\t", i.description, "\n");
  }
  return lines;
}

}  // namespace quire_torch
