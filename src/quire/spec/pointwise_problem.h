// What is asked of norms and activations, whose result may be quantized as it is computed.
#pragma once

#include <string>

#include "quire/spec/activation.h"
#include "quire/spec/problem.h"

namespace quire {

/// Where a computed matrix goes: as it is, quantized, or both. The bytes are those of quantizing y, rounded to its
/// dtype.
struct Destination {
  MutableMatrix y;  ///< data == nullptr: only the sides are wanted; dtype and sizes count all the same
  QuantSpec spec{};
  Side rowwise{}, columnwise{};
  const float* scale = nullptr;  ///< as in QuantizeProblem
  GivenAmax amax{};              ///< the same

  /// The quantization of y.
  QuantizeProblem quantization() const {
    return {
        .spec = spec, .x = y, .rowwise = rowwise, .columnwise = columnwise, .random = {}, .scale = scale, .amax = amax};
  }
};

enum class NormKind : uint8_t { layer, rms };
constexpr std::string_view name(NormKind kind) { return kind == NormKind::layer ? "LayerNorm" : "RMSNorm"; }

/// y = (x - mean) * rstd * gamma (+ beta) per row (numerics.md 11.2); RMSNorm has mean 0.
struct NormProblem {
  static constexpr std::string_view kOp = "norm";
  NormKind kind = NormKind::layer;
  Matrix x;
  Vector gamma, beta;
  bool zero_centered = false;  ///< gamma + 1 is used for gamma
  float eps = 0;
  Destination out;
  float* mean = nullptr;  ///< [rows] or null
  float* rstd = nullptr;  ///< [rows] or null
};

/// The gradients of a norm, each computed where its pointer is not null.
struct NormGradProblem {
  static constexpr std::string_view kOp = "norm_grad";
  NormKind kind = NormKind::layer;
  Matrix dy, x;
  Vector gamma;
  bool zero_centered = false;
  const float* mean = nullptr;  ///< [rows], as the norm gave it; null for RMSNorm
  const float* rstd = nullptr;  ///< [rows]
  MutableMatrix dx;
  void* dgamma = nullptr;  ///< [cols], in gamma's dtype
  void* dbeta = nullptr;   ///< [cols], in gamma's dtype
};

/// y [M, H] from x [M, H], or [M, 2H] for a gated activation (numerics.md 11.3). y may take the place of x's first H
/// columns. Of groups: a tensor of its own each, as in QuantizeProblem; rows of no group are zero in y.
struct ActivationProblem {
  static constexpr std::string_view kOp = "activation";
  Activation activation;
  Matrix x;
  Destination out;
  RowGroups groups{};
  Room room{};  ///< of groups: of out's sides

  bool in_groups() const { return !is_one(groups); }
};

/// dx, shaped like x, from dy [M, H]. Rows beyond the last group give zero, whatever they hold.
struct ActivationGradProblem {
  static constexpr std::string_view kOp = "activation_grad";
  Activation activation;
  Matrix dy, x;
  MutableMatrix dx;
  RowGroups groups{};

  bool in_groups() const { return !is_one(groups); }
};

std::string to_string(const NormProblem& p);
std::string to_string(const NormGradProblem& p);
std::string to_string(const ActivationProblem& p);
std::string to_string(const ActivationGradProblem& p);

}  // namespace quire
