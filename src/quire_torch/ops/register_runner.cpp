#include "quire_torch/ops/register_runner.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>
#include <span>
#include <vector>

#include "quire/runner/linear_runner.h"
#include "quire/runner/moe_runner.h"
#include "quire/runner/registry.h"
#include "quire_torch/bridge/storage.h"
#include "quire_torch/op/device.h"
#include "quire_torch/op/op.h"
#include "quire_torch/ops/operands.h"
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
  at::Tensor bias, input_scale;  ///< contiguous, the latter on the host; or undefined

  at::Device device() const { return tensors[0].device(); }

  quire::WeightOptions options() const {
    quire::WeightOptions o{.count = count};
    if (bias.defined()) o.bias = {bias.const_data_ptr(), dtype(bias.scalar_type(), what.c_str())};
    const float* const scales = input_scale.defined() ? input_scale.const_data_ptr<float>() : nullptr;
    if (scales) o.input_scales.assign(scales, scales + input_scale.numel());
    return o;
  }

  /// Of a float tensor [E, N, K].
  PreparedWeight quantized(const TensorStorage& storage) const {
    const at::Tensor& all = tensors[0];
    check(all.sizes() == at::IntArrayRef({count, n, k}), what, " must be [", count, ", ", n, ", ", k, "], got ",
          all.sizes());
    const MatrixView view(all, what.c_str());
    return {view.matrix(), spec, options(), storage};
  }

  /// Of given buffers.
  PreparedWeight copied(const TensorStorage& storage) const {
    std::vector<quire::Side> each;
    for (size_t at = 0; at < tensors.size(); at += 3) {
      const BufferTensors b{tensors[at], tensors[at + 1], tensors[at + 2]};
      check_buffers(b, spec, {n, k}, quire::Direction::rowwise, what.c_str());
      each.push_back(side(b, quire::Direction::rowwise));
    }
    const quire::Operand w{
        .spec = spec, .outer = quire::times(count, n), .contraction = k, .each = {each.data(), each.size()}};
    return PreparedWeight(w, options(), storage);
  }

  PreparedWeight prepared() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    const TensorStorage storage(device());
    PreparedWeight weight = tensors.size() == 1 ? quantized(storage) : copied(storage);
    storage.finish();
    return weight;
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

  PreparedWeight next(const char* what) {
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
    std::optional<at::Device> place;
    for (const at::Tensor& t : s.tensors) {
      check(!t.is_meta(), what, " must have values, and is on the meta device; load or initialise it first");
      check_one_device(t.device(), s.device(), what);
      op::detail::check_memory(t, place, {"runners.register", what});
    }
    if (values) check_input(s.tensors[0], what);
    take_options(s);
    ++at_;
    return s.prepared();
  }

 private:
  void take_options(Stack& s) const {
    const at::Tensor &bias = a_.biases[at_], &scale = a_.input_scales[at_];
    if (bias.numel() > 0) {
      check_input(bias, s.what.c_str());
      check(bias.size(-1) == s.n && bias.numel() / s.n == s.count, s.what, "'s bias must have ", s.n,
            " features for each of ", s.count, ", got ", bias.sizes());
      check_one_device(bias.device(), s.device(), s.what, " and its bias");
      s.bias = bias.contiguous();
    }
    if (scale.numel() == 0) return;
    const bool floats = scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kDouble;
    check((scale.numel() == 1 || scale.numel() == s.count) && floats && !scale.is_meta(), s.what,
          "'s input_scale must be float32 or float64 with values, one or one for each of ", s.count, ", got ",
          scale.scalar_type(), " ", scale.sizes(), " on ", scale.device());
    s.input_scale = scale.to(op::kHost, at::kFloat).contiguous();
  }

  const Args& a_;
  std::span<const at::Tensor> rest_;
  size_t at_ = 0;
};

/// Experts of two stacks.
template <class Args>
quire::Experts experts(Stacks<Args>& stacks, const char* first, const char* second) {
  PreparedWeight w13 = stacks.next(first);
  return {std::move(w13), stacks.next(second)};
}

}  // namespace

int64_t RegisterLinearRunner::run(const Args& a) {
  return quire::register_runner(std::make_shared<quire::LinearRunner>(Stacks(a).next("runner: weight"), *a.x), a.name);
}

int64_t RegisterMoeRunner::run(const Args& a) {
  Stacks stacks(a);
  quire::Experts routed = experts(stacks, "runner: w13", "runner: w2");
  std::optional<quire::Experts> shared;
  if (stacks.count() > 2) shared = experts(stacks, "runner: shared_w13", "runner: shared_w2");
  const quire::MoeOptions options{.x = *a.x, .activation = *a.activation, .weight_on_input = a.weight_on_input};
  return quire::register_runner(std::make_shared<quire::MoeRunner>(std::move(routed), options, std::move(shared)),
                                a.name);
}

int64_t RegisterPythonRunner::run(const Args& a) {
  quire::RunnerInfo info{.kind = a.experts == 0 ? quire::RunnerKind::linear : quire::RunnerKind::moe,
                         .device = numbered(at::Device(a.device)).str(),
                         .in_features = a.in_features,
                         .out_features = a.out_features,
                         .experts = a.experts,
                         .description = a.description};
  return quire::register_runner(std::make_shared<PythonRunner>(std::move(info), a.function), a.name);
}

void take_weights(int64_t handle, int64_t from) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const quire::RegisteredRunnerPtr to = quire::find_runner("runners.refit", handle),
                                   source = quire::find_runner("runners.refit", from);
  const TensorStorage storage(at::Device(to->runner->info().device));
  to->runner->take(*source->runner, storage);
  storage.finish();
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
