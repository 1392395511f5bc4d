// Results that are quantized as they are computed: strips of rows are made, and quantized while they are in a cache.
#pragma once

#include "quire/cpu/generic/elements/lines.inl.h"
#include "quire/cpu/generic/quantize/amax.inl.h"
#include "quire/cpu/generic/quantize/quantize.inl.h"
#include "quire/cpu/generic/quantize/quantize_rows.inl.h"
#include "quire/cpu/generic/quantize/values.inl.h"

/// Whether every scale depends on its own block or is given, so that no row has to wait for another strip.
bool quantizes_by_strips(const QuantizeProblem& p) {
  return p.scale || plan_of(p).amaxes_are_given() || (p.spec.row().scope == Scope::block && !p.spec.row().has_amax);
}

/// Rows of a strip: as many as the tallest block and a tile of columns take; few where only rows are lines.
int64_t strip_rows(const QuantizeProblem& p) { return p.columnwise.data || p.spec.square ? kTile : 16; }

inline MutableMatrix rows_of(const MutableMatrix& y, int64_t first, int64_t count) {
  char* data = static_cast<char*>(y.data) + first * y.row_stride * size_of(y.dtype);
  return {data, y.dtype, count, y.cols, y.row_stride};
}

/// Bytes that floats hold, as memory of any dtype.
inline int64_t floats_for(int64_t elements, DType dtype) { return ceil_div(elements * size_of(dtype), int64_t{4}); }

/// Makes y strip by strip, make(first_row, rows_of_y); quantizes every strip at once if a plan is given. The strips
/// are in y if it has memory, else in scratch memory. Returns the amax of y if it is asked for.
template <class Make>
float make_strips(const MutableMatrix& y, const Plan* plan, int64_t height, bool amax_wanted, const Make& make) {
  const int64_t strips = ceil_div(y.rows, height);
  SharedMaximum found;
  const int64_t grain = kGrain / std::max<int64_t>(1, height * y.cols);
  parallel_for(strips, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
    const Scratch strip(y.data ? 0 : floats_for(height * y.cols, y.dtype));
    QuantizeScratch scratch;
    float amax = 0;
    for (int64_t s = begin; s < end; ++s) {
      // Make the strip, in y or in scratch memory, and use it while it is in a cache.
      const int64_t first = s * height, count = std::min(height, y.rows - first);
      const MutableMatrix part =
          y.data ? rows_of(y, first, count) : MutableMatrix{strip.get(), y.dtype, count, y.cols, y.cols};
      make(first, part);
      for (int64_t r = 0; amax_wanted && r < count; ++r) amax = std::max(amax, row_amax(part, r));
      if (plan) quantize_strip(*plan, {part, first}, scratch);
    }
    found.add(amax);
    finish_streams();
  });
  return found.value();
}

/// Makes the result of a problem and quantizes it: in one pass over strips, or, where a scale depends on more than its
/// block, as a whole and then from there.
template <class Make>
void produce(const Destination& to, const Make& make) {
  // begin() computes scales outside of parallel_for.
  const FloatMode mode;
  QuantizeProblem p = to.quantization();
  const bool quantized = p.rowwise.data || p.columnwise.data;
  // Nothing to quantize: only y.
  if (!quantized) return void(make_strips(to.y, nullptr, strip_rows(p), false, make));
  const bool measured = has_one_amax(p.spec) && !plan_of(p).amaxes_are_given() && !has_given_global(p);
  // Scales depend on no more than a strip: one pass.
  if (quantizes_by_strips(p)) {
    const Plan plan = plan_of(p);
    for (const Job& job : plan.jobs()) begin(job, amaxes_of(p).plain);
    const float amax = make_strips(to.y, &plan, strip_rows(p), measured, make);
    for (const Job& job : plan.jobs()) {
      finish(job, amax);
      if (measured) job.side.amax[0] = amax;
    }
    return;
  }
  // Otherwise the whole result first, its amax found on the way, then a second pass.
  MutableMatrix y = to.y;
  const Scratch whole(y.data ? 0 : floats_for(y.rows * y.cols, y.dtype));
  if (!y.data) y = {whole.get(), y.dtype, y.rows, y.cols, y.cols};
  const float amax = make_strips(y, nullptr, strip_rows(p), measured, make);
  p.x = y;
  const bool transformed = p.columnwise.data && p.spec.hadamard != Hadamard::off;
  quantize_under(p, transformed ? amaxes_of(p) : Amaxes{amax});
}
