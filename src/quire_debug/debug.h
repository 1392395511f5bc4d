// What exactness rests on, observable from Python with plain tensors (quire.debug).
#pragma once

#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// Element codes (uint8, not packed) of x under a signed element format, unscaled (numerics.md 1.1, 1.2).
struct DebugCast : OpBase {
  static constexpr const char* kName = "debug_cast";
  static constexpr const char* kNotDifferentiable = "has no gradient";
  struct Args {
    at::Tensor x;
    std::string format;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::format>("format")};
  };
  static constexpr std::array kResults{"codes"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_input(a.x, "debug_cast: x");
    const auto s = op::sizes<Int>(a.x);
    return {op::Result<Int>{{s.begin(), s.end()}, at::kByte}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The 16-token Hadamard transform of x [M, K]: bf16 [K, 16 ceil(M / 16)] (numerics.md 0.10).
struct DebugRht : OpBase {
  static constexpr const char* kName = "debug_rht";
  static constexpr const char* kNotDifferentiable = "has no gradient";
  struct Args {
    at::Tensor x;
    bool signs;
    static constexpr auto kFields = std::tuple{op::field<&Args::x>("x"), op::field<&Args::signs>("signs")};
  };
  static constexpr std::array kResults{"out"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    check_input(a.x, "debug_rht: x");
    const auto s = shape<Int>(a.x);
    return {op::Result<Int>{{s.back(), quire::round_up(quire::product(s, 0, s.size() - 1), 16)}, at::kBFloat16}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// A scale matrix uint8 [rows, cols] in the padded 128x4 layout (numerics.md 4.5); the padding is zero.
struct DebugSwizzle : OpBase {
  static constexpr const char* kName = "debug_swizzle";
  static constexpr const char* kNotDifferentiable = "has no gradient";
  struct Args {
    at::Tensor scale;
    static constexpr auto kFields = std::tuple{op::field<&Args::scale>("scale")};
  };
  static constexpr std::array kResults{"swizzled"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    quire::check(a.scale.dim() == 2 && a.scale.scalar_type() == at::kByte,
                 "debug_swizzle: scale must be a uint8 matrix, got ", a.scale.scalar_type(), " with ", a.scale.dim(),
                 " dimensions");
    return {op::Result<Int>{{quire::round_up(op::size<Int>(a.scale, 0), quire::kSwizzleRows),
                             quire::round_up(op::size<Int>(a.scale, 1), quire::kSwizzleCols)},
                            at::kByte}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The inverse of DebugSwizzle for a matrix of [rows, cols].
struct DebugUnswizzle : OpBase {
  static constexpr const char* kName = "debug_unswizzle";
  static constexpr const char* kNotDifferentiable = "has no gradient";
  struct Args {
    at::Tensor swizzled;
    c10::SymInt rows, cols;
    static constexpr auto kFields = std::tuple{op::field<&Args::swizzled>("swizzled"), op::field<&Args::rows>("rows"),
                                               op::field<&Args::cols>("cols")};
  };
  static constexpr std::array kResults{"scale"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    return {op::Result<Int>{{op::as<Int>(a.rows), op::as<Int>(a.cols)}, at::kByte}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// The four Philox words (as int64) of each block index (int64 [n]), numerics.md 0.11.
struct DebugPhilox : OpBase {
  static constexpr const char* kName = "debug_philox";
  static constexpr const char* kNotDifferentiable = "has no gradient";
  struct Args {
    at::Tensor blocks;
    int64_t seed, offset;
    static constexpr auto kFields = std::tuple{op::field<&Args::blocks>("blocks"), op::field<&Args::seed>("seed"),
                                               op::field<&Args::offset>("offset")};
  };
  static constexpr std::array kResults{"words"};

  template <class Int>
  static std::array<op::Result<Int>, 1> results(const Args& a) {
    quire::check(a.blocks.dim() == 1 && a.blocks.scalar_type() == at::kLong,
                 "debug_philox: blocks must be an int64 vector, got ", a.blocks.scalar_type(), " with ", a.blocks.dim(),
                 " dimensions");
    return {op::Result<Int>{{op::size<Int>(a.blocks, 0), Int(4)}, at::kLong}};
  }
  static void run(const Args& a, op::Tensors<1>& out, const quire::Context& context);
};

/// One update of the delayed-scaling state (numerics.md 1.6), out of place. history [L, n], scale [n], amax [n] = the
/// possibly reduced row 0 of the history; algorithm "max" or "most_recent".
struct DebugDelayedUpdate : OpBase {
  static constexpr const char* kName = "debug_delayed_update";
  static constexpr const char* kNotDifferentiable = "has no gradient";
  struct Args {
    at::Tensor history, scale, amax;
    std::string algorithm;
    double maximum;
    int64_t margin;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::history>("history"), op::field<&Args::scale>("scale"),
                   op::field<&Args::amax>("amax"),       op::field<&Args::algorithm>("algorithm"),
                   op::field<&Args::maximum>("maximum"), op::field<&Args::margin>("margin")};
  };
  static constexpr std::array kResults{"new_history", "new_scale"};

  template <class Int>
  static std::array<op::Result<Int>, 2> results(const Args& a) {
    const bool f32 = a.history.scalar_type() == at::kFloat && a.scale.scalar_type() == at::kFloat &&
                     a.amax.scalar_type() == at::kFloat;
    quire::check(f32 && a.history.dim() == 2 && a.scale.dim() == 1 && a.amax.dim() == 1,
                 "debug_delayed_update: history, scale and amax must be float32 of 2, 1 and 1 dimensions, got ",
                 a.history.sizes(), ", ", a.scale.sizes(), " and ", a.amax.sizes());
    quire::check(a.history.size(1) == a.scale.size(0) && a.scale.size(0) == a.amax.size(0) && a.history.size(0) > 0,
                 "debug_delayed_update: history [L, n], scale [n] and amax [n] must agree on n, and L > 0; got ",
                 a.history.sizes(), ", ", a.scale.sizes(), " and ", a.amax.sizes());
    const Int l = op::size<Int>(a.history, 0), n = op::size<Int>(a.history, 1);
    return {op::Result<Int>{{l, n}, at::kFloat}, op::Result<Int>{{n}, at::kFloat}};
  }
  static void run(const Args& a, op::Tensors<2>& out, const quire::Context& context);
};

}  // namespace quire_torch
