// Quantize, dequantize, and the empty buffers of a quantized tensor.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "quire_torch/bridge/context.h"
#include "quire_torch/bridge/tensor.h"
#include "quire_torch/bridge/text.h"
#include "quire_torch/op/fields.h"
#include "quire_torch/op/outputs.h"

namespace quire_torch {

/// What every operator of the library has in common.
struct OpBase {
  static constexpr const char* kNamespace = "quire";
  using Context = CallContext;
  /// Stashed operands are listed by the host, whichever device has them: stash, wgrad_stash.
  static constexpr std::string_view kOnHost = "stash";
};

/// Names of the results that hold a quantized tensor: quire::kBufferNames.
inline constexpr std::array<const char*, 6> kBufferResults{"rowwise_data",    "rowwise_scale",    "rowwise_amax",
                                                           "columnwise_data", "columnwise_scale", "columnwise_amax"};

/// Results that begin with one of another name.
consteval std::array<const char*, 7> before_buffers(const char* first) {
  std::array<const char*, 7> names{first};
  std::copy(kBufferResults.begin(), kBufferResults.end(), names.begin() + 1);
  return names;
}

/// The six results of a quantized tensor of x's shape.
template <class Int>
std::array<op::Result<Int>, 6> buffer_results(const at::Tensor& x, const quire::QuantSpec& spec, bool rowwise,
                                              bool columnwise) {
  const auto r = results(spec, shape<Int>(x), quire::Direction::rowwise, rowwise);
  const auto c = results(spec, shape<Int>(x), quire::Direction::columnwise, columnwise);
  return {r[0], r[1], r[2], c[0], c[1], c[2]};
}

/// Codes, scales and amaxes of x in the wanted directions. seed and offset are 64-bit patterns; both directions use
/// them. rowwise_amax, columnwise_amax: what quire::amax returned, or the largest of that over the parts of a larger
/// tensor, instead of measuring. sr_state: int64 [2] {seed, counter c} of a module instead of seed and offset: rowwise
/// draws with offset 2c and columnwise with 2c + 1. part: int64 {index, count}, x is one of equal parts of a larger
/// tensor along axis 0 (rows) or 1 (columns), and draws as it does there (numerics.md 0.11). Numbers behind these two
/// are where x is cut along the axis into pieces, of which each is a part of a piece of the larger tensor.
struct Quantize : OpBase {
  static constexpr const char* kName = "quantize";
  static constexpr const char* kNotDifferentiable = "has no gradient; use quire.Linear, or detach its input";
  struct Args {
    at::Tensor x;
    SpecText spec;
    bool rowwise = true, columnwise = false;
    int64_t seed = 0, offset = 0;
    std::optional<at::Tensor> scale{}, rowwise_amax{}, columnwise_amax{}, sr_state{}, part{};
    int64_t axis = 0;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"),
                                               op::field<&Args::spec>("spec"),
                                               op::field<&Args::rowwise>("rowwise"),
                                               op::field<&Args::columnwise>("columnwise"),
                                               op::field<&Args::seed>("seed", "0"),
                                               op::field<&Args::offset>("offset", "0"),
                                               op::field<&Args::scale>("scale", "None"),
                                               op::field<&Args::rowwise_amax>("rowwise_amax", "None"),
                                               op::field<&Args::columnwise_amax>("columnwise_amax", "None"),
                                               op::field<&Args::sr_state>("sr_state", "None"),
                                               op::field<&Args::part>("part", "None"),
                                               op::field<&Args::axis>("axis", "0")};
  };
  static constexpr auto kResults = kBufferResults;

  template <class Int>
  static std::array<op::Result<Int>, 6> results(const Args& a) {
    check_input(a.x, "quantize: x");
    quire::check(a.rowwise || a.columnwise, "quantize: rowwise and columnwise are both False; ask for at least one");
    return buffer_results<Int>(a.x, *a.spec, a.rowwise, a.columnwise);
  }
  static void run(const Args& a, op::Tensors<6>& out, const quire::Context& context);
};

/// The amaxes that quantize measures above the blocks of x, for each wanted direction: float32 [1], or [M] and [K]
/// where every line has one. Throws for a spec whose scales follow from blocks alone.
struct Amax : OpBase {
  static constexpr const char* kName = "amax";
  static constexpr const char* kNotDifferentiable = "has no gradient; detach its input";
  struct Args {
    at::Tensor x;
    SpecText spec;
    bool rowwise, columnwise;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::x>("x"), op::field<&Args::spec>("spec"), op::field<&Args::rowwise>("rowwise"),
                   op::field<&Args::columnwise>("columnwise")};
  };
  static constexpr std::array kResults{"rowwise_amax", "columnwise_amax"};

  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a) {
    check_input(a.x, "amax: x");
    quire::check(a.rowwise || a.columnwise, "amax: rowwise and columnwise are both False; ask for at least one");
    const auto sizes = shape<Int>(a.x);
    const Int m = quire::product(sizes, 0, sizes.size() - 1), none(0);
    return {op::Result<Int>{{a.rowwise ? quire::amax_count(*a.spec, m) : none}, at::kFloat},
            op::Result<Int>{{a.columnwise ? quire::amax_count(*a.spec, sizes.back()) : none}, at::kFloat}};
  }
  static void run(const Args& a, op::Tensors<2>& out, const quire::Context& context);
};

/// One direction decoded: rowwise to `shape`, columnwise to [K, tokens] as stored (numerics.md 3.4, 4.6, 5.1).
struct Dequantize : OpBase {
  static constexpr const char* kName = "dequantize";
  static constexpr const char* kNotDifferentiable = "has no gradient; its inputs are codes";
  struct Args {
    at::Tensor data, scale, amax;
    SpecText spec;
    bool columnwise;
    std::vector<c10::SymInt> shape;
    at::ScalarType dtype;
    static constexpr auto kFields = std::tuple{
        op::field<&Args::data>("data"),  op::field<&Args::scale>("scale"),           op::field<&Args::amax>("amax"),
        op::field<&Args::spec>("spec"),  op::field<&Args::columnwise>("columnwise"), op::field<&Args::shape>("shape"),
        op::field<&Args::dtype>("dtype")};
  };
  static constexpr std::array kResults{"out"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    quire::check(!a.shape.empty(), "dequantize: shape must have at least 1 dimension, got []");
    check_result_dtype(a.dtype, "dequantize: dtype");
    quire::Shape<Int> s;
    for (const auto& n : a.shape) s.push_back(op::as<Int>(n));
    op::Result<Int> r{{}, a.dtype};
    if (a.columnwise) {
      r.sizes.push_back(s.back());
      r.sizes.push_back(quire::columnwise_tokens(*a.spec, quire::product(s, 0, s.size() - 1)));
    } else {
      r.sizes.append(s.begin(), s.end());
    }
    return {r};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// One direction's codes and scales in the order that `spec` does not have: interleaved, or plain again (numerics.md
/// 2.4). Amaxes are the same in both.
struct Reorder : OpBase {
  static constexpr const char* kName = "reorder";
  static constexpr const char* kNotDifferentiable = "has no gradient; its inputs are codes";
  struct Args {
    at::Tensor data, scale, amax;
    SpecText spec;
    bool columnwise;
    std::vector<c10::SymInt> shape;
    static constexpr auto kFields = std::tuple{
        op::field<&Args::data>("data"), op::field<&Args::scale>("scale"),           op::field<&Args::amax>("amax"),
        op::field<&Args::spec>("spec"), op::field<&Args::columnwise>("columnwise"), op::field<&Args::shape>("shape")};
  };
  static constexpr std::array kResults{"data", "scale"};

  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a) {
    quire::check(!a.shape.empty(), "reorder: shape must have at least 1 dimension, got []");
    quire::Shape<Int> s;
    for (const auto& n : a.shape) s.push_back(op::as<Int>(n));
    const auto direction = a.columnwise ? quire::Direction::columnwise : quire::Direction::rowwise;
    const auto r = quire_torch::results(a.spec->reordered(), s, direction, /*wanted=*/true);
    return {r[0], r[1]};
  }
  static void run(const Args& a, op::Tensors<2>& out, const quire::Context& context);
};

/// 64 bits that change when x does (quire/quantize/fingerprint.h): int64 [1].
struct Fingerprint : OpBase {
  static constexpr const char* kName = "fingerprint";
  static constexpr const char* kNotDifferentiable = "has no gradient; its result is an integer";
  struct Args {
    at::Tensor x;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x")};
  };
  static constexpr std::array kResults{"fingerprint"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_input(a.x, "fingerprint: x");
    return {op::Result<Int>{{Int(1)}, at::kLong}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// Zeroed buffers for a tensor shaped like `like`, on its device.
struct EmptyQuantized : OpBase {
  static constexpr const char* kName = "empty_quantized";
  static constexpr const char* kNotDifferentiable = "has no gradient; its results are constants";
  struct Args {
    at::Tensor like;
    SpecText spec;
    bool rowwise, columnwise;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::like>("like"), op::field<&Args::spec>("spec"), op::field<&Args::rowwise>("rowwise"),
                   op::field<&Args::columnwise>("columnwise")};
  };
  static constexpr auto kResults = kBufferResults;

  template <class Int>
  static std::array<op::Result<Int>, 6> results(const Args& a) {
    quire::check(a.like.dim() >= 1, "empty_quantized: like must have at least 1 dimension, got a scalar");
    return buffer_results<Int>(a.like, *a.spec, a.rowwise, a.columnwise);
  }
  static void run(const Args& a, op::Tensors<6>& out, const quire::Context& context);
};

}  // namespace quire_torch
