// Rows of groups of tokens, quantized and decoded again: each group as a tensor of its own (numerics.md 0.19).
#pragma once

#include "quire_torch/ops/operands.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// One direction of x [*, K], whose rows belong to E groups as offsets [E] says, or are one group without them, in flat
/// buffers (quire/spec/groups.h).
/// scale: float32 [E], multiplies before the cast (fp8_tensor); amax is then [E]. given_amax: what quire::grouped_amax
/// returned, or the largest of that over the parts of a larger tensor, instead of measuring.
struct GroupedQuantize : OpBase {
  static constexpr const char* kName = "grouped_quantize";
  static constexpr const char* kNotDifferentiable = Quantize::kNotDifferentiable;
  struct Args {
    at::Tensor x;
    op::OptionalTensor offsets;
    SpecText spec;
    bool columnwise;
    std::optional<at::Tensor> scale{}, amax{};
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::spec>("spec"),
                                               op::field<&Args::columnwise>("columnwise"),
                                               op::field<&Args::scale>("scale", "None"),
                                               op::field<&Args::amax>("given_amax", "None")};
    quire::Direction direction() const { return columnwise ? quire::Direction::columnwise : quire::Direction::rowwise; }
  };
  static constexpr std::array kResults{"data", "scale", "amax"};

  template <class Int>
  static std::array<op::Result<Int>, 3> results(const Args& a) {
    check_input(a.x, "grouped_quantize: x");
    const int64_t groups = group_count(a.offsets, a.x, "grouped_quantize");
    const auto x = shape<Int>(a.x);
    auto r = rows_results<Int>(*a.spec, {quire::product(x, 0, x.size() - 1), x.back(), groups}, a.offsets.has_value(),
                               a.direction(), true);
    if (a.scale) r[2] = {{Int(groups)}, at::kFloat};
    return r;
  }
  static void run(const Args& a, op::Tensors<3>& out, const quire::Context& context);
};

/// The amaxes that grouped_quantize measures above the blocks of x in one direction: float32 [E]; where every line has
/// one, [T] rowwise for the T rows of x, or [E * K] columnwise. 0 where there are no rows. Throws for a spec whose
/// scales follow from blocks alone.
struct GroupedAmax : OpBase {
  static constexpr const char* kName = "grouped_amax";
  static constexpr const char* kNotDifferentiable = Amax::kNotDifferentiable;
  struct Args {
    at::Tensor x;
    op::OptionalTensor offsets;
    SpecText spec;
    bool columnwise;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::x>("x"), op::field<&Args::offsets>("offsets"), op::field<&Args::spec>("spec"),
                   op::field<&Args::columnwise>("columnwise")};
    quire::Direction direction() const { return columnwise ? quire::Direction::columnwise : quire::Direction::rowwise; }
  };
  static constexpr std::array kResults{"amax"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_input(a.x, "grouped_amax: x");
    const int64_t groups = group_count(a.offsets, a.x, "grouped_amax");
    const auto x = shape<Int>(a.x);
    const quire::GroupSizes<Int> sizes{quire::product(x, 0, x.size() - 1), x.back(), groups};
    return {op::Result<Int>{{quire::grouped_amax_count(*a.spec, sizes, a.direction())}, at::kFloat}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// Rowwise codes of groups as values, [*, K] of `shape`; rows that belong to no group are zero.
struct GroupedDequantize : OpBase {
  static constexpr const char* kName = "grouped_dequantize";
  static constexpr const char* kNotDifferentiable = Dequantize::kNotDifferentiable;
  struct Args {
    at::Tensor data, scale, amax;
    op::OptionalTensor offsets;
    SpecText spec;
    std::vector<c10::SymInt> shape;
    at::ScalarType dtype;
    static constexpr auto kFields = std::tuple{op::field<&Args::data>("data"),  op::field<&Args::scale>("scale"),
                                               op::field<&Args::amax>("amax"),  op::field<&Args::offsets>("offsets"),
                                               op::field<&Args::spec>("spec"),  op::field<&Args::shape>("shape"),
                                               op::field<&Args::dtype>("dtype")};
  };
  static constexpr std::array kResults{"out"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    group_count(a.offsets, a.data, "grouped_dequantize");
    quire::check(!a.shape.empty(), "grouped_dequantize: shape must have at least 1 dimension, got []");
    check_result_dtype(a.dtype, "grouped_dequantize: dtype");
    op::Result<Int> r{{}, a.dtype};
    for (const auto& n : a.shape) r.sizes.push_back(op::as<Int>(n));
    return {r};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

}  // namespace quire_torch
