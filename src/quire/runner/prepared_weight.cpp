#include "quire/runner/prepared_weight.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "quire/base/check.h"
#include "quire/device/place.h"
#include "quire/operations/operations.h"

namespace quire {
namespace {

/// The amax that an input_scale of 1 stands for.
constexpr float kAmaxOfOne = 6 * 448;

/// Elements of the buffers of one weight [rows, cols].
BufferCounts<int64_t> counts_of(const QuantSpec& spec, int64_t rows, int64_t cols) {
  return counts(buffers<int64_t>(spec, {rows, cols}, Direction::rowwise));
}

/// The spec that is kept.
QuantSpec kept_spec(const QuantSpec& spec) { return spec.interleaved || spec.swizzled ? spec : spec.reordered(); }

}  // namespace

PreparedWeight::PreparedWeight(const QuantSpec& spec, const std::array<int64_t, 2>& sizes, const WeightOptions& options,
                               const Storage& storage)
    : spec_(spec), count_(options.count), place_(place_of(storage.context())) {
  const auto [all_rows, cols] = sizes;
  check(count_ >= 1 && all_rows % count_ == 0, "runner: ", all_rows, " rows do not make ", count_,
        " weights of one size; give a row for each output feature of each");
  const int64_t rows = all_rows / count_;
  check(rows >= 1 && cols >= 1, "runner: a weight must be [out_features, in_features] with at least one of each; got [",
        rows, ", ", cols, "]");
  check(!spec.stochastic, "runner: weight spec ", spec.to_string(),
        " rounds stochastically, which is for gradients; leave sr out");
  const QuantSpec kept = kept_spec(spec);
  BufferCounts<int64_t> room = counts_of(kept, rows, cols);
  for (int64_t& elements : room) elements = times(elements, count_);
  CallMemory plan;
  std::array<int64_t, 3> places{};
  const std::array bytes = bytes_of(kept, room);
  for (size_t i = 0; i < places.size(); ++i) places[i] = plan.plan(bytes[i]);
  codes_bytes_ = plan.plan(0);
  codes_ = storage.allocate(codes_bytes_);
  auto* const memory = static_cast<std::byte*>(codes_.get());
  operand_ = {.spec = kept,
              .outer = all_rows,
              .contraction = cols,
              .data = memory + places[0],
              .scale = memory + places[1],
              .amax = reinterpret_cast<const float*>(memory + places[2]),
              .groups = RowGroups::equal(count_, rows),
              .room = room,
              .what = "runner: weight"};
}

PreparedWeight::PreparedWeight(const Matrix& w, const QuantSpec& spec, const WeightOptions& options,
                               const Storage& storage)
    : PreparedWeight(spec, {w.rows, w.cols}, options, storage) {
  quantize({.spec = operand_.spec,
            .x = w,
            .rowwise = written(0),
            .columnwise = {},
            .random = {},
            .groups = operand_.groups,
            .room = {.rowwise = operand_.room},
            .what = operand_.what},
           storage.context());
  keep(options, storage);
}

PreparedWeight::PreparedWeight(const Operand& w, const WeightOptions& options, const Storage& storage)
    : PreparedWeight(w.spec, {w.outer, w.contraction}, options, storage) {
  check(w.direction == Direction::rowwise,
        "runner: a weight must be given by its rowwise codes; got columnwise ones; quantize it with rowwise=True");
  check(count_ == 1 || std::ssize(w.each) == count_, "runner: each of ", count_, " weights has a side; got ",
        w.each.size());
  const std::array bytes = bytes_of(w.spec, counts_of(w.spec, out_features(), in_features()));
  for (int64_t e = 0; e < count_; ++e) {
    const Side to = written(e);
    const std::array<const void*, 3> from =
        w.each.empty()
            ? std::array<const void*, 3>{w.data, w.scale, w.amax}
            : std::array<const void*, 3>{w.each[static_cast<size_t>(e)].data, w.each[static_cast<size_t>(e)].scale,
                                         w.each[static_cast<size_t>(e)].amax};
    const std::array<void*, 3> places{to.data, to.scale, to.amax};
    for (size_t i = 0; i < bytes.size(); ++i) {
      check(from[i] != nullptr || bytes[i] == 0, "runner: ", kBufferNames[i], " of the weight is a null pointer; give ",
            bytes[i], " bytes for ", w.spec.to_string(), " [", out_features(), ", ", in_features(), "]");
      // The amax is the same in both orders.
      if (bytes[i] > 0 && (i == 2 || w.spec == operand_.spec)) storage.copy(places[i], from[i], bytes[i]);
    }
    if (w.spec == operand_.spec) continue;
    const Operand one{.spec = w.spec,
                      .outer = out_features(),
                      .contraction = in_features(),
                      .data = from[0],
                      .scale = from[1],
                      .amax = static_cast<const float*>(from[2])};
    reorder({.from = one, .data = to.data, .scale = to.scale}, storage.context());
  }
  keep(options, storage);
}

void PreparedWeight::check_taken(const PreparedWeight& other, const char* what) const {
  const auto described = [](const PreparedWeight& w) {
    return text(w.count_, " of [", w.out_features(), ", ", w.in_features(), "] in ", w.operand_.spec, " on ", w.place_,
                w.bias_.data ? text(" with a bias in ", name(w.bias_.dtype)) : std::string(" without a bias"));
  };
  const std::string own = described(*this), theirs = described(other);
  check(own == theirs, "runner: ", what, " has ", own, ", and its new values must have the same form; got ", theirs,
        "; register another runner for them");
  check(input_scales_ || !other.input_scales_, "runner: ", what,
        " has no static scale of its input, and the new one has; leave the input_scale out");
}

void PreparedWeight::take(const PreparedWeight& other, const Storage& storage) {
  storage.copy(codes_.get(), other.codes_.get(), codes_bytes_);
  if (bias_.data != nullptr)
    storage.copy(bias_memory_.get(), other.bias_.data, times(operand_.outer, size_of(bias_.dtype)));
  if (!other.input_scales_) return;
  storage.copy(scales_memory_.get(), other.input_scales_, times(3 * count_, int64_t{sizeof(float)}));
  largest_scale_ = other.largest_scale_;
}

Side PreparedWeight::written(int64_t weight) const {
  const std::array step = bytes_of(operand_.spec, counts_of(operand_.spec, out_features(), in_features()));
  const auto at = [&](const void* all, size_t i) {
    return const_cast<std::byte*>(static_cast<const std::byte*>(all)) + weight * step[i];
  };
  return {at(operand_.data, 0), at(operand_.scale, 1), reinterpret_cast<float*>(at(operand_.amax, 2))};
}

void PreparedWeight::keep(const WeightOptions& options, const Storage& storage) {
  if (options.bias.data != nullptr) {
    const int64_t bytes = times(operand_.outer, size_of(options.bias.dtype));
    bias_memory_ = storage.allocate(bytes);
    storage.copy(bias_memory_.get(), options.bias.data, bytes);
    bias_ = {bias_memory_.get(), options.bias.dtype};
  }
  if (!options.input_scales.empty()) keep_scales(options.input_scales, storage);
}

void PreparedWeight::keep_scales(const std::vector<float>& scales, const Storage& storage) {
  check(scales.size() == 1 || std::ssize(scales) == count_, "runner: there is one input_scale, or one for each of ",
        count_, " weights; got ", scales.size());
  std::array<std::vector<float>, 3> each;
  for (int64_t e = 0; e < count_; ++e) {
    const float s = scales[scales.size() == 1 ? 0 : static_cast<size_t>(e)];
    check(s > 0 && std::isfinite(s), "runner: an input_scale must be positive and finite; got ", s,
          "; give amax / 448 of the calibration for x=fp8_tensor (of E5M2: amax / 57344) and amax / (6 * 448) for ",
          "x=nvfp4, or its reciprocal if you have the inverse of that");
    largest_scale_ = std::max(largest_scale_, s);
    each[0].push_back(s), each[1].push_back(s * (6.0f * 256)), each[2].push_back(s * kAmaxOfOne);
  }
  const int64_t bytes = times(count_, int64_t{sizeof(float)});
  scales_memory_ = storage.allocate(3 * bytes);
  auto* const memory = static_cast<float*>(scales_memory_.get());
  for (int64_t i = 0; i < 3; ++i) storage.upload(memory + i * count_, each[static_cast<size_t>(i)].data(), bytes);
  input_scales_ = memory;
  input_amaxes_ = {memory + count_, memory + 2 * count_};
}

void PreparedWeight::check_input_spec(const InputSpec& input) const {
  check(input || !input_scales_,
        "runner: an input_scale is one of activations that are quantized; got x=none; leave the input_scale out");
  if (!input) return;
  const QuantSpec& x = *input;
  check(!x.stochastic, "runner: activation spec ", x, " rounds stochastically, which is for gradients; leave sr out");
  check(!x.interleaved, "runner: activation spec ", x, " is interleaved, which is for weights; leave interleaved out");
  check(!x.given || input_scales_, "runner: activation spec ", x,
        " has its scale from the caller, and there is no input_scale; give one, or leave 'given' out");
  if (!input_scales_) return;
  const bool f32 = x.row().scope == Scope::tensor, two = x.row().scale == ScaleKind::two_level && !x.row_scaled;
  check((f32 && !x.pow2 && x.epsilon == 0) || two,
        "runner: an input_scale is one of activations with one scale of the tensor; got x=", x,
        "; leave the input_scale out, or take x=nvfp4 or x=fp8_tensor");
  check(input_spec(x).given || std::isfinite(largest_scale_ * kAmaxOfOne),
        "runner: 2688 times an input_scale must be positive and finite; got ", largest_scale_,
        "; give amax / (6 * 448) of the calibration, or its reciprocal if you have 6 * 448 / amax");
}

void PreparedWeight::check_tokens_alone(const InputSpec& x) const {
  if (x) quire::check_tokens_alone(*x, text("runner: x=", x->to_string()), input_scales_ != nullptr);
}

QuantSpec PreparedWeight::input_spec(const QuantSpec& x) const {
  QuantSpec spec = x;
  spec.given = x.given || (input_scales_ && (x.row().scope == Scope::tensor || x.global != Global::amax));
  if (spec.given) spec.hadamard = Hadamard::off;  // of columnwise codes only
  return spec;
}

const float* PreparedWeight::input_amax(const QuantSpec& x) const {
  if (!input_scales_ || input_spec(x).given) return nullptr;
  return x.block_scale_max() == 256 ? input_amaxes_.of_256 : input_amaxes_.of_448;
}

QuantizeProblem PreparedWeight::quantization(const Matrix& x, const QuantSpec& spec, const RowCodes& codes) const {
  const QuantSpec used = input_spec(spec);
  return {.spec = used,
          .x = x,
          .rowwise = codes.side,
          .columnwise = {},
          .random = {},
          .scale = used.given ? input_scales_ : nullptr,
          .amax = {.rowwise = input_amax(spec)},
          .role = "x",
          .groups = codes.groups,
          .room = {.rowwise = codes.room},
          .what = "runner: x"};
}

Destination PreparedWeight::destination(const MutableMatrix& y, const QuantSpec& x, const RowCodes& codes) const {
  const QuantSpec used = input_spec(x);
  return {.y = y,
          .spec = used,
          .rowwise = codes.side,
          .scale = used.given ? input_scales_ : nullptr,
          .amax = {.rowwise = input_amax(x)}};
}

GemmProblem PreparedWeight::product(const RowCodes& x, const QuantSpec& spec, const MutableMatrix& out,
                                    const char* name) const {
  return {.a = {.spec = spec,
                .outer = out.rows,
                .contraction = in_features(),
                .data = x.side.data,
                .scale = x.side.scale,
                .amax = x.side.amax,
                .groups = x.groups,
                .room = x.room,
                .what = "runner: x"},
          .b = operand_,
          .out = out,
          .bias = bias_.data,
          .bias_dtype = bias_.dtype,
          .role = {name, "x", "w"}};
}

MatmulProblem PreparedWeight::plain_product(const Matrix& x, const RowGroups& groups, const MutableMatrix& out) const {
  return {.a = x, .b = {}, .transpose_b = true, .bias = bias_, .out = out, .groups = groups, .codes = operand_};
}

}  // namespace quire
