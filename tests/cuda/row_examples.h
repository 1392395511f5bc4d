// Problems of each kind that has several rows on a GPU, with what they write.
#pragma once

#include <string>
#include <vector>

#include "cuda/product_case.h"
#include "quire/spec/routing.h"

namespace quire::testing {

/// Problems of each kind that has several rows, and what they write.
struct Examples {
  explicit Examples(ProductCases& all) : cases(all) {}

  QuantizeProblem quantize(const char* spec = "mxfp8", DType dtype = DType::bf16) {
    QuantizeProblem p;
    p.spec = QuantSpec::parse(spec), p.x = cases.matrix(dtype, 40, 96);
    const auto side = [&](Direction d) {
      const auto count = counts(buffers<int64_t>(p.spec, {40, 96}, d));
      return Side{result(count[0]), result(count[1] * (has_byte_scales(p.spec) ? 1 : 4)),
                  static_cast<float*>(result(count[2] * 4))};
    };
    p.rowwise = side(kRows), p.columnwise = side(kColumns);
    return p;
  }
  AmaxProblem amax() {
    return {.spec = QuantSpec::parse("nvfp4"),
            .x = cases.matrix(DType::f32, 40, 96),
            .rowwise = static_cast<float*>(result(4))};
  }
  DequantizeProblem dequantize(const char* spec, Direction direction) {
    const Operand from = cases.operand(spec, direction, 96, 64);
    return {.spec = from.spec,
            .direction = direction,
            .rows = direction == kRows ? 96 : 64,
            .cols = direction == kRows ? 64 : 96,
            .data = from.data,
            .scale = from.scale,
            .amax = from.amax,
            .out = matrix(DType::bf16, 96, 64)};
  }
  GemmProblem gemm(const char* a, const char* b, int64_t m) {
    return {
        .a = cases.operand(a, kRows, m, 96), .b = cases.operand(b, kRows, 24, 96), .out = matrix(DType::bf16, m, 24)};
  }
  /// Of a weight: in codes, or of the result's dtype. `groups`: of which there are two, with ends on the device.
  MatmulProblem matmul(const char* spec, DType dtype, int64_t m, bool groups) {
    MatmulProblem p{.a = cases.aligned(dtype, m, 96), .b = {}, .transpose_b = true, .out = matrix(dtype, m, 24)};
    const int64_t count = groups ? 2 : 1;
    if (*spec)
      p.codes = cases.operand(spec, kRows, count * 24, 96, groups ? RowGroups::equal(2, 24) : RowGroups{});
    else
      p.b = cases.aligned(dtype, count * 24, 96);
    p.b.dtype = dtype;
    if (groups) p.groups = cases.groups({m / 3, m}, m);
    return p;
  }
  NormProblem norm() {
    NormProblem p;
    p.x = aligned(9, 64), p.gamma = {aligned(1, 64).data, DType::f32}, p.beta = p.gamma;
    p.eps = 1e-5f, p.out.y = matrix(DType::f32, 9, 64), p.rstd = static_cast<float*>(result(9 * 4));
    return p;
  }
  NormGradProblem norm_grad() {
    NormGradProblem p;
    p.dy = aligned(9, 64), p.x = aligned(9, 64), p.gamma = {aligned(1, 64).data, DType::f32};
    p.mean = p.rstd = static_cast<const float*>(p.gamma.data), p.dx = matrix(DType::f32, 9, 64);
    p.dgamma = result(64 * 4);
    return p;
  }
  ActivationProblem activation() {
    ActivationProblem p;
    p.activation = Activation::parse("swiglu"), p.x = aligned(9, 128), p.out.y = matrix(DType::f32, 9, 64);
    return p;
  }
  ActivationGradProblem activation_grad() {
    return {.activation = Activation::parse("swiglu"),
            .dy = aligned(9, 64),
            .x = aligned(9, 128),
            .dx = matrix(DType::f32, 9, 128)};
  }
  RouteProblem route() {
    RouteProblem p{.routing = Routing::parse("softmax:topk=2"), .logits = aligned(9, 8)};
    p.weights = static_cast<float*>(result(18 * 4)), p.ids = static_cast<int32_t*>(result(18 * 4));
    return p;
  }
  RouteGradProblem route_grad() {
    return {.routing = Routing::parse("softmax:topk=2"),
            .logits = aligned(9, 8),
            .ids = ids(),
            .dweights = static_cast<const float*>(aligned(9, 2).data),
            .dlogits = matrix(DType::f32, 9, 8)};
  }
  CapacityProblem capacity() {
    return {.ids = ids(), .count = 18, .num_experts = 8, .capacity = 2, .kept = static_cast<int32_t*>(result(18 * 4))};
  }
  ExpertRowsProblem expert_rows() {
    return {.ids = ids(),
            .count = 18,
            .row_map = static_cast<int32_t*>(result(18 * 4)),
            .offsets = static_cast<int32_t*>(result(8 * 4)),
            .num_experts = 8};
  }

  PermuteProblem permute(bool weighted) {
    return {.from = aligned(9, 64), .map = map(), .weights = weights(weighted), .to = matrix(DType::f32, 20, 64)};
  }
  UnpermuteProblem unpermute(bool weighted) {
    return {.from = aligned(20, 64), .map = map(), .weights = weights(weighted), .to = matrix(DType::f32, 9, 64)};
  }
  PermutedDotProblem permuted_dot() {
    return {
        .permuted = aligned(20, 64), .tokens = aligned(9, 64), .map = map(), .to = static_cast<float*>(result(18 * 4))};
  }

  ProductCases& cases;
  std::vector<Written> written;

 private:
  void* result(int64_t bytes) {
    written.push_back({"a result", cases.twins().room<std::byte>(bytes), bytes});
    return written.back().data;
  }
  MutableMatrix matrix(DType dtype, int64_t rows, int64_t cols) {
    MutableMatrix m{result(rows * cols * size_of(dtype)), dtype, rows, cols, cols};
    written.back().floats = dtype;
    return m;
  }
  Matrix aligned(int64_t rows, int64_t cols) {
    auto* const to = cases.twins().room<float>(rows * cols);
    for (int64_t i = 0; i < rows * cols; ++i) to[i] = static_cast<float>(static_cast<int>(i * 37 % 64) - 31) / 16;
    return {to, DType::f32, rows, cols, cols};
  }
  const float* weights(bool wanted) { return wanted ? static_cast<const float*>(aligned(9, 2).data) : nullptr; }
  /// Of nine tokens with two slots, of which one has no row.
  RowMap map() {
    std::vector<int32_t> rows;
    for (int32_t i = 0; i < 18; ++i) rows.push_back(i == 5 ? -1 : (i * 7 + 3) % 20);
    return {cases.twins().array(rows), 9, 2};
  }
  const int32_t* ids() {
    std::vector<int32_t> all;
    for (int32_t i = 0; i < 18; ++i) all.push_back((i * 5 / 2 + i % 2) % 8);
    return cases.twins().array(all);
  }
};

/// Calls each(problem, what it writes) for problems of which every row of the tables takes one.
template <class Each>
void each_example(ProductCases& cases, const Each& each) {
  const auto with = [&](const auto& make) {
    cases.clear();
    Examples examples(cases);
    each(make(examples), examples.written);
  };
  for (const char* spec : {"mxfp8", "nvfp4:rht:sr", "fp8_tensor"}) with([&](Examples& e) { return e.quantize(spec); });
  with([](Examples& e) { return e.amax(); });
  with([](Examples& e) { return e.dequantize("nvfp4", kRows); });
  with([](Examples& e) { return e.dequantize("mxfp8", kColumns); });
  for (const int64_t rows : {1, 40}) with([&](Examples& e) { return e.gemm("mxfp8", "mxfp8", rows); });
  with([](Examples& e) { return e.gemm("nvfp4", "nvfp4", 40); });
  with([](Examples& e) { return e.matmul("nvfp4", DType::bf16, 40, true); });
  with([](Examples& e) { return e.matmul("", DType::f16, 40, true); });
  with([](Examples& e) { return e.norm(); });
  with([](Examples& e) { return e.norm_grad(); });
  with([](Examples& e) { return e.activation(); });
  with([](Examples& e) { return e.activation_grad(); });
  with([](Examples& e) { return e.route(); });
  with([](Examples& e) { return e.route_grad(); });
  with([](Examples& e) { return e.capacity(); });
  with([](Examples& e) { return e.expert_rows(); });
  with([](Examples& e) { return e.permute(true); });
  for (const bool weighted : {true, false}) with([&](Examples& e) { return e.unpermute(weighted); });
  with([](Examples& e) { return e.permuted_dot(); });
}

}  // namespace quire::testing
