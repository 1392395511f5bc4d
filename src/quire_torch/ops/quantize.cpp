#include "quire_torch/ops/quantize.h"

#include "quire/operations/operations.h"

namespace quire_torch {
namespace {

/// Amaxes that a caller gave for one direction of `lines` lines; null if there are none.
const float* given_amax(const op::OptionalTensor& t, const quire::QuantSpec& spec, int64_t lines, const char* name) {
  if (!t) return nullptr;
  const int64_t count = quire::amax_count(spec, lines);
  quire::check(count > 0 || lines == 0, "quantize: scales of ", spec.to_string(),
               " follow from blocks alone, so there is no amax; leave ", name,
               " out, or use fp8_tensor, fp8_row or nvfp4");
  quire::check(t->scalar_type() == at::kFloat && t->numel() == count && t->is_contiguous(), "quantize: ", name, " of ",
               spec.to_string(), " must be what quire::amax returns, contiguous float32 [", count, "], got ",
               t->scalar_type(), " ", t->sizes());
  return t->const_data_ptr<float>();
}

/// What a contiguous int64 tensor of one dimension holds, of two numbers or more where `open`; null if there is none.
const int64_t* numbers_of(const op::OptionalTensor& t, const char* name, const char* holds, bool open = false) {
  if (!t) return nullptr;
  quire::check(t->scalar_type() == at::kLong && t->dim() == 1 && t->is_contiguous() &&
                   (open ? t->numel() >= 2 : t->numel() == 2),
               "quantize: ", name, " must be a contiguous int64 [2", open ? " + cuts" : "", "] tensor ", holds,
               ", got ", t->scalar_type(), " ", t->sizes());
  return t->const_data_ptr<int64_t>();
}

quire::Randomness randomness(const Quantize::Args& a) {
  quire::check(a.axis == 0 || a.axis == 1, "quantize: axis must be 0 (rows) or 1 (columns), got ", a.axis);
  quire::check(!a.sr_state || (a.seed == 0 && a.offset == 0),
               "quantize: sr_state stands for seed and offset; leave these out");
  const auto seed = static_cast<uint64_t>(a.seed), offset = static_cast<uint64_t>(a.offset);
  return {.seed = seed,
          .rowwise_offset = offset,
          .columnwise_offset = a.sr_state ? 1 : offset,
          .state = numbers_of(a.sr_state, "sr_state", "{seed, counter}"),
          .part = numbers_of(a.part, "part", "{index, count, cuts}", true),
          .axis = static_cast<int>(a.axis),
          .cuts = a.part ? a.part->numel() - 2 : 0};
}

}  // namespace

void Quantize::run(const Args& a, op::Tensors<6>& out, const quire::Context& context) {
  const MatrixView x(a.x, "quantize: x");
  quire::quantize({.spec = *a.spec,
                   .x = x.matrix(),
                   .rowwise = a.rowwise ? side(out, quire::Direction::rowwise) : quire::Side{},
                   .columnwise = a.columnwise ? side(out, quire::Direction::columnwise) : quire::Side{},
                   .random = randomness(a),
                   .scale = given_scale(a.scale, "quantize", ": scale"),
                   .amax = {.rowwise = given_amax(a.rowwise_amax, *a.spec, x.matrix().rows, "rowwise_amax"),
                            .columnwise = given_amax(a.columnwise_amax, *a.spec, x.matrix().cols, "columnwise_amax")}},
                  context);
}

void Amax::run(const Args& a, op::Tensors<2>& out, const quire::Context& context) {
  const MatrixView x(a.x, "amax: x");
  quire::amax({.spec = *a.spec,
               .x = x.matrix(),
               .rowwise = a.rowwise ? out[0].mutable_data_ptr<float>() : nullptr,
               .columnwise = a.columnwise ? out[1].mutable_data_ptr<float>() : nullptr},
              context);
}

namespace {

/// One direction of a quantized tensor, as Dequantize and Reorder take it.
struct StoredSide {
  quire::Direction direction;
  quire::Shape<int64_t> shape;
  quire::Side side;

  template <class Args>
  StoredSide(const Args& a, const char* what)
      : direction(a.columnwise ? quire::Direction::columnwise : quire::Direction::rowwise) {
    for (const auto& n : a.shape) shape.push_back(op::as<int64_t>(n));
    BufferTensors b;
    const size_t first = quire::first_buffer(direction);
    b[first] = a.data, b[first + 1] = a.scale, b[first + 2] = a.amax;
    check_buffers(b, *a.spec, shape, direction, what);
    side = quire_torch::side(b, direction);
  }
};

}  // namespace

void Dequantize::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const auto [direction, shape, s] = StoredSide(a, "dequantize: data");
  quire::dequantize({.spec = *a.spec,
                     .direction = direction,
                     .rows = quire::product(shape, 0, shape.size() - 1),
                     .cols = shape.back(),
                     .data = s.data,
                     .scale = s.scale,
                     .amax = s.amax,
                     .out = mutable_matrix(out[0])},
                    context);
}

void Reorder::run(const Args& a, op::Tensors<2>& out, const quire::Context& context) {
  const auto [direction, shape, from] = StoredSide(a, "reorder: data");
  const int64_t rows = quire::product(shape, 0, shape.size() - 1), cols = shape.back();
  const bool columnwise = direction == quire::Direction::columnwise;
  quire::reorder({.from = {.spec = *a.spec,
                           .direction = direction,
                           .outer = columnwise ? cols : rows,
                           .contraction = columnwise ? quire::columnwise_tokens(*a.spec, rows) : cols,
                           .data = from.data,
                           .scale = from.scale,
                           .amax = from.amax},
                  .data = out[0].mutable_data_ptr(),
                  .scale = out[1].mutable_data_ptr()},
                 context);
}

void Fingerprint::run(const Args& a, op::Tensors<1>& out, const quire::Context& context) {
  const MatrixView x(a.x, "fingerprint: x");
  quire::fingerprint({.x = x.matrix(), .to = out[0].mutable_data_ptr<int64_t>()}, context);
}

void EmptyQuantized::run(const Args&, op::Tensors<6>& out, const quire::Context&) {
  // Not left uninitialised: the same call gives the same bytes, always.
  for (at::Tensor& t : out) t.zero_();
}

}  // namespace quire_torch
