// The faults of kernels that tests/planted/bugs.py plants, by name.
#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planted/rows.h"
#include "quire/base/fault.h"
#include "quire/device/dispatch.h"
#include "quire/spec/buffers.h"

namespace planted {
namespace {

using quire::Direction;

/// Quantization: what follows from the spec, the amax, the scale and the random bits.

void hadamard_without_signs(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  if (p.spec.hadamard == quire::Hadamard::signs) p.spec.hadamard = quire::Hadamard::no_signs;
  kernel(p);
}
void forgets_nan(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  p.spec.nan = false;
  kernel(p);
}
void ignores_static_scale(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  if (std::exchange(p.spec.given, false)) p.scale = nullptr;
  kernel(p);
}
void amax_without_last_row(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  float amax[2]{};
  const bool measures = !p.scale && !p.amax.rowwise && !p.amax.columnwise && quire::amax_count(p.spec, p.x.rows) == 1;
  if (measures && p.x.rows > 1 && p.spec.hadamard == quire::Hadamard::off) {
    quire::Matrix without = p.x;
    --without.rows;
    quire::dispatch(quire::AmaxProblem{.spec = p.spec, .x = without, .rowwise = amax, .columnwise = amax + 1},
                    kernel.context);
    p.amax = {.rowwise = p.rowwise.data ? amax : nullptr, .columnwise = p.columnwise.data ? amax + 1 : nullptr};
  }
  kernel(p);
}
void scale_of_another_operand(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  if (p.scale && !p.spec.given && std::string_view(p.role) == "x") ++p.scale;
  kernel(p);
}
void one_offset_for_both_directions(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  p.random.columnwise_offset = p.random.rowwise_offset;
  kernel(p);
}
void accepts_any_value(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  try {
    kernel(p);
  } catch (const quire::FaultError&) {  // nobody hears of it
  }
}
void draws_as_first_part(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  p.random = p.random.read();
  p.random.index = 0;
  kernel(p);
}

/// Quantization: where bytes lie.

int64_t count_of_scales(const quire::QuantizeProblem& p, Direction direction) {
  return quire::counts(quire::buffers(p.spec, quire::Shape<int64_t>{p.x.rows, p.x.cols}, direction))[1];
}
void stores_lower_e8m0(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  kernel(p);
  auto* const scales = static_cast<uint8_t*>(p.rowwise.scale);
  if (!scales || p.spec.row().scale != quire::ScaleKind::e8m0) return;
  for (uint8_t& scale : std::span(scales, static_cast<size_t>(count_of_scales(p, Direction::rowwise))))
    if (scale > 0 && scale < 255) --scale;
}
void swaps_swizzled_scales(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  kernel(p);
  auto* const scales = static_cast<uint8_t*>(p.rowwise.scale);
  if (!scales || !p.spec.swizzled) return;
  const int64_t count = count_of_scales(p, Direction::rowwise);
  for (int64_t tile = 0; tile + 8 <= count; tile += 512) std::swap(scales[tile], scales[tile + 4]);
}
void sets_padding(quire::QuantizeProblem p, const Kernel<quire::QuantizeProblem>& kernel) {
  kernel(p);
  auto* const data = static_cast<uint8_t*>(p.rowwise.data);
  if (!data || !p.spec.packed() || p.spec.interleaved || p.x.cols % 2 == 0) return;
  for (int64_t i = 1; i <= p.x.rows; ++i) data[i * (p.x.cols + 1) / 2 - 1] |= 0xF0;
}

/// Products.

uint8_t* at(const quire::MutableMatrix& m, int64_t row, int64_t col) {
  return static_cast<uint8_t*>(m.data) + (row * m.row_stride + col) * quire::size_of(m.dtype);
}
void leaves_out_bias(quire::GemmProblem p, const Kernel<quire::GemmProblem>& kernel) {
  p.bias = nullptr;
  kernel(p);
}
void leaves_out_addend(quire::GemmProblem p, const Kernel<quire::GemmProblem>& kernel) {
  p.addend = nullptr;
  kernel(p);
}
void leaves_out_last_column(quire::GemmProblem p, const Kernel<quire::GemmProblem>& kernel) {
  kernel(p);
  for (int64_t i = 0; i < p.out.rows && p.out.cols > 1; ++i)
    std::memset(at(p.out, i, p.out.cols - 1), 0, static_cast<size_t>(quire::size_of(p.out.dtype)));
}
void depends_on_other_rows(quire::GemmProblem p, const Kernel<quire::GemmProblem>& kernel) {
  kernel(p);
  if (kernel.context.batch_invariant && p.out.rows > 1 && p.out.cols > 0) *at(p.out, 0, 0) ^= 1;
}
void ends_first_group_early(quire::GemmProblem p, const Kernel<quire::GemmProblem>& kernel) {
  const quire::Integers ends = p.a.groups.ends;
  std::vector<int64_t> moved;
  for (int64_t i = 0; ends.data && i < ends.count; ++i) moved.push_back(ends[i]);
  const auto first = std::ranges::find_if(moved, [](int64_t end) { return end > 0; });
  if (first != moved.end()) --*first;
  if (ends.data) p.a.groups.ends = {moved.data(), ends.count, true};
  kernel(p);
}
void writes_rows_of_no_group(quire::GemmProblem p, const Kernel<quire::GemmProblem>& kernel) {
  kernel(p);
  const quire::Integers ends = p.a.groups.ends;
  if (!ends.data || !p.out.data || p.a.direction != Direction::rowwise || p.out.cols == 0) return;
  for (int64_t i = ends.count > 0 ? ends[ends.count - 1] : 0; i < p.out.rows; ++i) *at(p.out, i, 0) = 1;
}
void sum_without_last_row(quire::ColumnSumProblem p, const Kernel<quire::ColumnSumProblem>& kernel) {
  if (p.x.rows > 0) --p.x.rows;
  kernel(p);
}

/// Norms, activations, mixtures of experts.

void forgets_zero_centered(quire::NormGradProblem p, const Kernel<quire::NormGradProblem>& kernel) {
  p.zero_centered = false;
  kernel(p);
}
void swaps_equal_scores(quire::RouteProblem p, const Kernel<quire::RouteProblem>& kernel) {
  kernel(p);
  const int64_t topk = p.routing.topk;
  for (int64_t t = 0; t < p.logits.rows && p.logits.dtype == quire::DType::f32; ++t) {
    const float* const logits = static_cast<const float*>(p.logits.data) + t * p.logits.row_stride;
    for (int32_t* id = p.ids + t * topk; id + 1 < p.ids + (t + 1) * topk; ++id)
      if (logits[id[0]] == logits[id[1]]) std::swap(id[0], id[1]);
  }
}

void ignores_order_of_chunks(quire::ChunkRowsProblem p, const Kernel<quire::ChunkRowsProblem>& kernel) {
  p.order = {};
  kernel(p);
}

/// States.

void accepts_stale_codes(quire::FingerprintProblem p, const Kernel<quire::FingerprintProblem>& kernel) {
  if (!p.expected) kernel(p);
}
void does_not_count(quire::AdvanceProblem, const Kernel<quire::AdvanceProblem>&) {}
void forgets_earlier_amaxes(quire::CollectProblem p, const Kernel<quire::CollectProblem>& kernel) {
  std::fill_n(p.amax, p.count, 0.0f);
  kernel(p);
}
void forgets_oldest_amax(quire::DelayedUpdateProblem p, const Kernel<quire::DelayedUpdateProblem>& kernel) {
  std::vector<double> rules(p.rules, p.rules + p.rule_count * quire::kRuleColumns);
  for (size_t rule = 0; rule < rules.size(); rule += quire::kRuleColumns)
    rules[rule + quire::kLength] = std::max(1.0, rules[rule + quire::kLength] - 1);
  p.rules = rules.data();
  kernel(p);
}

struct Named {
  const char* name;
  void (*plant)();
};

template <auto fault>
constexpr auto one = Planter<fault>::of_tensors;
template <auto fault>
constexpr auto groups = Planter<fault>::of_groups;

const Named kFaults[] = {
    {"hadamard_without_signs", one<hadamard_without_signs>},
    {"forgets_nan", one<forgets_nan>},
    {"ignores_static_scale", one<ignores_static_scale>},
    {"amax_without_last_row", one<amax_without_last_row>},
    {"scale_of_another_operand", one<scale_of_another_operand>},
    {"one_offset_for_both_directions", one<one_offset_for_both_directions>},
    {"accepts_any_value", one<accepts_any_value>},
    {"draws_as_first_part", one<draws_as_first_part>},
    {"stores_lower_e8m0", one<stores_lower_e8m0>},
    {"swaps_swizzled_scales", one<swaps_swizzled_scales>},
    {"sets_padding", one<sets_padding>},
    {"leaves_out_bias", one<leaves_out_bias>},
    {"leaves_out_addend", one<leaves_out_addend>},
    {"leaves_out_last_column", one<leaves_out_last_column>},
    {"depends_on_other_rows", one<depends_on_other_rows>},
    {"ends_first_group_early", groups<ends_first_group_early>},
    {"writes_rows_of_no_group", groups<writes_rows_of_no_group>},
    {"sum_without_last_row", one<sum_without_last_row>},
    {"forgets_zero_centered", one<forgets_zero_centered>},
    {"swaps_equal_scores", one<swaps_equal_scores>},
    {"ignores_order_of_chunks", one<ignores_order_of_chunks>},
    {"accepts_stale_codes", one<accepts_stale_codes>},
    {"does_not_count", one<does_not_count>},
    {"forgets_earlier_amaxes", one<forgets_earlier_amaxes>},
    {"forgets_oldest_amax", one<forgets_oldest_amax>},
};

}  // namespace
}  // namespace planted

/// Names of all faults, one a line.
extern "C" const char* planted_names() {
  static const std::string names = [] {
    std::string lines;
    for (const planted::Named& fault : planted::kFaults) lines += std::string(fault.name) + "\n";
    return lines;
  }();
  return names.c_str();
}

/// Plants the fault of that name for the rest of the process. Returns whether there is one.
extern "C" bool plant(const char* name) {
  for (const planted::Named& fault : planted::kFaults)
    if (std::string_view(fault.name) == name) {
      fault.plant();
      return true;
    }
  return false;
}
