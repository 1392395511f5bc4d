#include "quire_torch/ops/register_runner.h"

#include <optional>
#include <span>

#include "quire/runner/linear_runner.h"
#include "quire/runner/moe_runner.h"
#include "quire/runner/registry.h"
#include "quire_torch/ops/operand.h"
#include "quire_torch/ops/tensor_runner.h"

namespace quire_torch {
namespace {

using quire::PreparedWeight, quire::check;

/// A stack of E weights as the operators get it.
struct Stack {
  std::string what;  ///< for errors: "runner: w13"
  const quire::QuantSpec& spec;
  int64_t count, n, k;
  std::span<const at::Tensor> tensors;
  at::Tensor bias, input_scale;  ///< contiguous, or undefined

  quire::WeightOptions options(int64_t i) const {
    quire::WeightOptions o;
    if (bias.defined()) {
      const quire::DType t = dtype(bias.scalar_type(), what.c_str());
      o.bias = {static_cast<const char*>(bias.const_data_ptr()) + i * n * size_of(t), t};
    }
    if (input_scale.defined()) o.input_scale = input_scale.const_data_ptr<float>()[input_scale.numel() == 1 ? 0 : i];
    return o;
  }

  /// The i-th of a float tensor [E, N, K].
  PreparedWeight quantized(int64_t i) const {
    const at::Tensor& all = tensors[0];
    check(all.sizes() == at::IntArrayRef({count, n, k}), what, " must be [", count, ", ", n, ", ", k, "], got ",
          all.sizes());
    const at::Tensor one = all[i];
    const MatrixView view(one, what.c_str());
    return {view.matrix(), spec, options(i)};
  }

  /// The i-th of given buffers.
  PreparedWeight copied(int64_t i) const {
    const size_t at = static_cast<size_t>(3 * i);
    const BufferTensors b{tensors[at], tensors[at + 1], tensors[at + 2]};
    check_buffers(b, spec, {n, k}, quire::Direction::rowwise, what.c_str());
    const quire::Side codes = side(b, quire::Direction::rowwise);
    const quire::Operand w{
        .spec = spec, .outer = n, .contraction = k, .data = codes.data, .scale = codes.scale, .amax = codes.amax};
    return PreparedWeight(w, options(i));
  }
};

/// Takes stacks from the operators' lists, one after the other.
template <class Args>
class Stacks {
 public:
  explicit Stacks(const Args& a) : a_(a), rest_(a.weights) {
    check(a.biases.size() * 3 == a.shapes.size() && a.input_scales.size() * 3 == a.shapes.size(),
          "runner: shapes must have {E, N, K} for each stack, biases and input_scales a tensor, got ", a.shapes.size(),
          ", ", a.biases.size(), " and ", a.input_scales.size(), "; call quire.runners.register");
  }
  int64_t count() const { return static_cast<int64_t>(a_.biases.size()); }

  std::vector<PreparedWeight> next(const char* what) {
    check(at_ < a_.biases.size() && !rest_.empty(), what, " is missing; call quire.runners.register");
    const auto size = [&](size_t i) { return op::as<int64_t>(a_.shapes[3 * at_ + i]); };
    Stack s{what, *a_.w, size(0), size(1), size(2), {}, {}, {}};
    const bool values = rest_[0].scalar_type() != at::kByte;
    const auto given = static_cast<int64_t>(rest_.size());
    check(s.count >= 1 && (values || s.count <= given / 3), what,
          " must be one tensor, or three rowwise buffers for each of ", s.count, ", got ", given);
    const size_t tensors = values ? 1 : static_cast<size_t>(3 * s.count);
    s.tensors = rest_.first(tensors);
    rest_ = rest_.subspan(tensors);
    for (const at::Tensor& t : s.tensors)
      check(t.device().is_cpu(), what, " must be on the CPU, got ", t.device(), "; move it with .cpu()");
    if (values) check_input(s.tensors[0], what);
    take_options(s);
    ++at_;
    std::vector<PreparedWeight> out;
    for (int64_t i = 0; i < s.count; ++i) out.push_back(values ? s.quantized(i) : s.copied(i));
    return out;
  }

 private:
  void take_options(Stack& s) const {
    const at::Tensor &bias = a_.biases[at_], &scale = a_.input_scales[at_];
    if (bias.numel() > 0) {
      check_input(bias, s.what.c_str());
      check(bias.size(-1) == s.n && bias.numel() / s.n == s.count && bias.device().is_cpu(), s.what,
            "'s bias must have ", s.n, " features for each of ", s.count, " on the CPU, got ", bias.sizes(), " on ",
            bias.device());
      s.bias = bias.contiguous();
    }
    if (scale.numel() == 0) return;
    const bool floats = scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kDouble;
    check((scale.numel() == 1 || scale.numel() == s.count) && floats && scale.device().is_cpu(), s.what,
          "'s input_scale must be float32 or float64 on the CPU, one or one for each of ", s.count, ", got ",
          scale.scalar_type(), " ", scale.sizes(), " on ", scale.device());
    s.input_scale = scale.to(at::kFloat).contiguous();
  }

  const Args& a_;
  std::span<const at::Tensor> rest_;
  size_t at_ = 0;
};

/// Experts of two stacks.
template <class Args>
std::vector<quire::Expert> experts(Stacks<Args>& stacks, const char* first, const char* second) {
  std::vector<PreparedWeight> w13 = stacks.next(first), w2 = stacks.next(second);
  check(w13.size() == w2.size(), first, " and w2 must have as many experts, got ", w13.size(), " and ", w2.size());
  std::vector<quire::Expert> out;
  for (size_t i = 0; i < w13.size(); ++i) out.push_back({std::move(w13[i]), std::move(w2[i])});
  return out;
}

}  // namespace

int64_t RegisterLinearRunner::run(const Args& a) {
  std::vector<PreparedWeight> w = Stacks(a).next("runner: weight");
  check(w.size() == 1, "runner: a linear runner has one weight, got ", w.size());
  return quire::register_runner(std::make_shared<quire::LinearRunner>(std::move(w[0]), *a.x), a.name);
}

int64_t RegisterMoeRunner::run(const Args& a) {
  Stacks stacks(a);
  std::vector<quire::Expert> routed = experts(stacks, "runner: w13", "runner: w2"), shared;
  if (stacks.count() > 2) shared = experts(stacks, "runner: shared_w13", "runner: shared_w2");
  check(shared.size() <= 1, "runner: there is one shared expert, got ", shared.size());
  const quire::MoeOptions options{.x = *a.x, .activation = *a.activation, .weight_on_input = a.weight_on_input};
  std::optional<quire::Expert> one;
  if (!shared.empty()) one = std::move(shared[0]);
  return quire::register_runner(std::make_shared<quire::MoeRunner>(std::move(routed), options, std::move(one)), a.name);
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
