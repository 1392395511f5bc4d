// Activation functions and their gradients (numerics.md 11.3), some elements at a time.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/pointwise/produce.inl.h"
#include "quire/cpu/generic/pointwise/sigmoid.inl.h"

/// Values of a curve at x, and its slopes if they are wanted.
template <Curve C>
[[gnu::flatten]] void curve_values(float alpha, const float* __restrict x, float* __restrict value,
                                   float* __restrict slope) {
  if constexpr (is_of_sigmoid(C)) {
    if (slope)
      sigmoid_curve<C, true>(alpha, x, value, slope);
    else
      sigmoid_curve<C, false>(alpha, x, value, nullptr);
  } else {
    for (int64_t j = 0; j < kPiece; ++j) value[j] = curve_at<C>(x[j], alpha).value;
    for (int64_t j = 0; slope && j < kPiece; ++j) slope[j] = curve_at<C>(x[j], alpha).slope;
  }
}

using CurveValues = void (*)(float alpha, const float* x, float* value, float* slope);

CurveValues curve_values_of(Curve curve) {
  switch (curve) {
    case Curve::sigmoid:
      return curve_values<Curve::sigmoid>;
    case Curve::gelu:
      return curve_values<Curve::gelu>;
    case Curve::swish:
      return curve_values<Curve::swish>;
    case Curve::relu:
      return curve_values<Curve::relu>;
    case Curve::squared_relu:
      return curve_values<Curve::squared_relu>;
  }
  return nullptr;
}

/// A piece of a row: what goes into the curve and what its value is multiplied by, with the derivatives that clamping
/// has, 0 or 1.
struct Piece {
  alignas(64) float x[kPiece] = {}, up[kPiece] = {}, value[kPiece], slope[kPiece];
  alignas(64) float x_passes[kPiece], up_passes[kPiece];
};

[[gnu::flatten]] inline void clamp(const Activation& a, Piece& p) {
  for (int64_t j = 0; j < kPiece; ++j) {
    p.x_passes[j] = p.x[j] > a.limit ? 0.0f : 1.0f;
    p.x[j] = p.x[j] > a.limit ? a.limit : p.x[j];
    const float u = p.up[j], low = u < -a.limit ? -a.limit : u;
    p.up_passes[j] = u < -a.limit || u > a.limit ? 0.0f : 1.0f;
    p.up[j] = (low > a.limit ? a.limit : low) + a.offset;
  }
}

/// Where a piece is: elements [col, col + count) of a row of the result.
struct PiecePlace {
  int64_t row, col, count;
};

/// Reads a piece of a row; asks for the same of the next row where rows are pieces of several streams, which a
/// processor does not foresee while a piece is computed.
inline void read_columns(const Matrix& x, const PiecePlace& at, bool asks, float* to) {
  if (asks) prefetch(element_of(x, at.row + 1, at.col), at.count * size_of(x.dtype));
  read_line(x.dtype, element_of(x, at.row, at.col), at.count, to);
}

/// Reads a piece of x and takes it through the curve.
inline void read_piece(const Activation& a, const Matrix& x, const PiecePlace& at, bool sloped, Piece& p) {
  const bool gated = a.row().gated;
  read_columns(x, at, gated, p.x);
  if (gated) read_columns(x, {at.row, x.cols / 2 + at.col, at.count}, gated, p.up);
  if (a.row().clamped) clamp(a, p);
  curve_values_of(a.row().curve)(a.alpha, p.x, p.value, sloped ? p.slope : nullptr);
}

[[gnu::flatten]] inline void multiply_pieces(const float* a, float* b) {
  for (int64_t j = 0; j < kPiece; ++j) b[j] = a[j] * b[j];
}

void activation(const ActivationProblem& p) {
  produce(p.out, [&](int64_t first, const MutableMatrix& y) {
    Piece piece;
    for (int64_t r = 0; r < y.rows; ++r)
      for (int64_t col = 0; col < y.cols; col += kPiece) {
        const int64_t count = std::min(kPiece, y.cols - col);
        read_piece(p.activation, p.x, {first + r, col, count}, false, piece);
        if (p.activation.row().gated) multiply_pieces(piece.up, piece.value);
        write_line(y.dtype, piece.value, count, static_cast<char*>(rows_of(y, r, 1).data) + col * size_of(y.dtype));
      }
  });
}

/// value becomes the gradient of up, slope that of the curve's argument.
[[gnu::flatten]] inline void gradients(const Activation& a, const float* __restrict dy, Piece& p) {
  const bool gated = a.row().gated, clamped = a.row().clamped;
  for (int64_t j = 0; j < kPiece; ++j) {
    const float upstream = gated ? dy[j] * p.up[j] : dy[j];
    const float dx = upstream * p.slope[j], d_up = dy[j] * p.value[j];
    p.slope[j] = clamped && p.x_passes[j] == 0.0f ? 0.0f : dx;
    p.value[j] = clamped && p.up_passes[j] == 0.0f ? 0.0f : d_up;
  }
}

void activation_grad(const ActivationGradProblem& p) {
  const auto write = [&](const float* from, const PiecePlace& at) {
    char* to = static_cast<char*>(rows_of(p.dx, at.row, 1).data) + at.col * size_of(p.dx.dtype);
    write_line(p.dx.dtype, from, at.count, to);
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, p.dy.cols));
  parallel_for(p.dy.rows, grain, [&](int64_t begin, int64_t end) {
    Piece piece;
    alignas(64) float dy[kPiece] = {};
    for (int64_t r = begin; r < end; ++r)
      for (int64_t col = 0; col < p.dy.cols; col += kPiece) {
        const int64_t count = std::min(kPiece, p.dy.cols - col);
        read_piece(p.activation, p.x, {r, col, count}, true, piece);
        read_columns(p.dy, {r, col, count}, p.activation.row().gated, dy);
        gradients(p.activation, dy, piece);
        write(piece.slope, {r, col, count});
        if (p.activation.row().gated) write(piece.value, {r, p.dy.cols + col, count});
      }
  });
}
