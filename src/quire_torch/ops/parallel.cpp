#include "quire_torch/ops/parallel.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>

#include <charconv>
#include <vector>

#include "quire/spec/buffers.h"
#include "quire_torch/bridge/role.h"
#include "quire_torch/op/device.h"
#include "quire_torch/ops/agree.h"
#include "quire_torch/ops/grouped_quantize.h"
#include "quire_torch/ops/linear_grads.h"

namespace quire_torch {
namespace {

using quire::Direction;

/// Whether there is an amax for each line rather than one of the tensor.
bool has_line_amaxes(const quire::QuantSpec& spec) { return quire::amax_count<int64_t>(spec, 2) == 2; }

/// Parts of part's sizes, one after another along `axis`, of what all_gather put one after another in memory.
at::Tensor along(const at::Tensor& gathered, const at::Tensor& part, int axis, const Group& group) {
  auto sizes = part.sym_sizes().vec();
  auto split = sizes;
  split.insert(split.begin(), group.size);
  sizes[static_cast<size_t>(axis)] = sizes[static_cast<size_t>(axis)] * group.size;
  return gathered.view_symint(split).movedim(0, axis).reshape_symint(sizes).contiguous();
}

at::Tensor largest_of(const at::Tensor& t, const Group& group) {
  return wait(all_reduce(t, "max", group), "all_reduce", group);
}

/// Each amax becomes the largest over the group.
void reduce_amaxes(const std::vector<at::Tensor*>& amaxes, const Group& group) {
  if (amaxes.empty()) return;
  op::TensorList own;
  for (const at::Tensor* t : amaxes) own.push_back(*t);
  const at::Tensor largest = largest_of(own.size() == 1 ? own[0] : at::cat(own), group);
  c10::SymInt begin = 0;
  for (at::Tensor* t : amaxes) {
    const c10::SymInt count = t->sym_size(0);
    *t = amaxes.size() == 1 ? largest : largest.narrow_symint(0, begin, count).contiguous();
    begin = begin + count;
  }
}

/// Rowwise and columnwise amaxes above the blocks of this rank's part.
op::Tensors<2> amaxes_of(const Part& one) {
  if (!one.offsets) return op::call<Amax>({one.t.detach(), text_of(one.spec), one.rowwise, one.columnwise});
  op::Tensors<2> found;
  for (const bool columnwise : {false, true})
    if (columnwise ? one.columnwise : one.rowwise)
      found[columnwise] = op::call<GroupedAmax>({one.t.detach(), one.offsets, text_of(one.spec), columnwise})[0];
  return found;
}

/// The buffers of groups, under these amaxes where there are some.
op::Tensors<6> codes_of_groups(const Part& one, const op::Tensors<2>& amaxes) {
  op::Tensors<6> codes;
  for (at::Tensor& t : codes) t = one.t.new_empty({0});
  for (const bool columnwise : {false, true}) {
    if (!(columnwise ? one.columnwise : one.rowwise)) continue;
    const at::Tensor& amax = amaxes[columnwise];
    const auto q = op::call<GroupedQuantize>({.x = one.t.detach(),
                                              .offsets = one.offsets,
                                              .spec = text_of(one.spec),
                                              .columnwise = columnwise,
                                              .scale = one.scale,
                                              .amax = amax.defined() ? std::optional(amax) : std::nullopt});
    std::copy(q.begin(), q.end(), codes.begin() + (columnwise ? 3 : 0));
  }
  return codes;
}

/// A spec of partial results. They are rounded to nearest, for they have no random state, and in the order of a matrix.
quire::QuantSpec sendable(std::string_view text) {
  const quire::QuantSpec spec = quire::QuantSpec::parse(text);
  quire::check(
      !spec.stochastic && !spec.swizzled && !spec.interleaved,
      "parallel_linear: reduce must be 'float32' or a spec without stochastic rounding and without an order of ",
      "its own, such as 'mxfp8'; got '", text, "'");
  return spec;
}

}  // namespace

Parallel Parallel::parse(std::string_view text) {
  Parallel p;
  std::string_view rest = text;
  const auto next = [&] {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view word = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    return word;
  };
  const std::string_view mode = next(), group = next(), size = next();
  std::string_view word = next();
  if ((p.sequence = word == "sequence")) word = next();
  if ((p.ring = p.sequence && word == "overlap=ring")) word = next();
  const std::string_view reduce = word.starts_with("reduce=") ? word.substr(7) : "";
  if (!reduce.empty()) word = next();
  if ((p.own_gradients = word == "own_gradients")) word = next();
  const auto [end, error] =
      std::from_chars(size.data() + std::min<size_t>(5, size.size()), size.data() + size.size(), p.group.size);
  quire::check((mode == "column" || mode == "row") && group.starts_with("group=") && group.size() > 6 &&
                   size.starts_with("size=") && error == std::errc() && end == size.data() + size.size() &&
                   p.group.size >= 1 && word.empty() && rest.empty(),
               "parallel_linear: parallel must be 'column,group=NAME,size=N' or 'row,group=NAME,size=N', with ",
               "',sequence' behind it where tokens are sharded, then ',overlap=ring' to exchange them in pieces, ",
               "',reduce=float32' or ',reduce=SPEC' for sums of float32, and ',own_gradients' where somebody else adds "
               "gradients of biases; got '",
               text, "'");
  p.column = mode == "column";
  p.group.name = group.substr(6);
  p.sums_float32 = !reduce.empty();
  if (p.sums_float32 && reduce != "float32") p.sent_as = sendable(reduce);
  return p;
}

std::string Parallel::to_string() const {
  return quire::text(column ? "column" : "row", ",group=", group.name, ",size=", group.size,
                     sequence ? ",sequence" : "", ring ? ",overlap=ring" : "", sums_float32 ? ",reduce=" : "",
                     sent_as        ? sent_as->to_string()
                     : sums_float32 ? "float32"
                                    : "",
                     own_gradients ? ",own_gradients" : "");
}

std::array<TokenAxis, 3> token_axes(const quire::QuantSpec& spec, Direction direction) {
  // Sizes that every block divides.
  constexpr int64_t kRows = 512, kCols = 512;
  const auto part = quire::buffers<int64_t>(spec, {kRows, kCols}, direction),
             whole = quire::buffers<int64_t>(spec, {2 * kRows, kCols}, direction);
  const auto axis = [](const quire::Buffer<int64_t>& a, const quire::Buffer<int64_t>& b) {
    for (size_t i = 0; i < a.sizes.size(); ++i)
      if (a.sizes[i] != b.sizes[i]) return TokenAxis{static_cast<int>(i), kRows / a.sizes[i]};
    return TokenAxis{};
  };
  return {axis(part.data, whole.data), axis(part.scale, whole.scale), axis(part.amax, whole.amax)};
}

bool needs_reduction(const quire::QuantSpec& spec, int axis) {
  return axis >= 0 && !spec.given && quire::amax_count<int64_t>(spec, 1) > 0;
}

void check_input_scale(const OptionalRecipeText& recipe, const op::OptionalTensor& input_scale,
                       const op::OptionalTensor& fwd_scale, bool starts_from_x, const char* what) {
  const quire::LinearSpec* known = recipe->has_value() ? &**recipe : nullptr;
  const bool given = known && !known->weight_only && known->x.given;
  quire::check(given || !input_scale, what, ": input_scale is given, and under recipe '", recipe.text(),
               "' x has no scale of the layer; leave input_scale out, or add the option 'given' to x");
  quire::check(!given || input_scale, what, ": under recipe '", recipe.text(),
               "' x has its scale from the caller, and there is no input_scale; give the static scale, or leave ",
               "the option 'given' out");
  quire::check(!given || !fwd_scale, what, ": input_scale and fwd_scale are both given, and x would have two scales; ",
               "leave one out");
  quire::check(!given || !starts_from_x, what, ": under recipe '", recipe.text(),
               "' the gradient of w starts from x itself, which is quantized before; take backward=dequantized, or ",
               "none");
}

at::Tensor reduced(const at::Tensor& amax, int axis, const Group& group) {
  return axis < 0 ? amax : largest_of(amax, group);
}

namespace {

std::vector<op::Tensors<2>> amaxes_of_wholes(const std::vector<Part>& parts, const Group& group) {
  std::vector<op::Tensors<2>> amaxes(parts.size());
  std::vector<at::Tensor*> shared;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& one = parts[i];
    if (one.scale || !needs_reduction(one.spec, one.axis)) continue;
    amaxes[i] = amaxes_of(one);
    // Lines that one rank has whole have amaxes of their own.
    const bool lines = has_line_amaxes(one.spec);
    if (one.rowwise && (!lines || one.axis == 1)) shared.push_back(&amaxes[i][0]);
    if (one.rowwise && lines && one.axis == 1) agree_before(amaxes[i][0]);
    if (one.columnwise && (!lines || one.axis == 0)) shared.push_back(&amaxes[i][1]);
  }
  reduce_amaxes(shared, group);
  return amaxes;
}

}  // namespace

op::Tensors<2> reduced_amaxes(const Part& part, const Group& group) { return amaxes_of_wholes({part}, group)[0]; }

std::vector<op::Tensors<6>> quantize_parts(const std::vector<Part>& parts, const Group& group) {
  const std::vector<op::Tensors<2>> amaxes = amaxes_of_wholes(parts, group);
  std::vector<op::Tensors<6>> codes;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& one = parts[i];
    const NamedRole role(one.role);
    if (one.offsets) {
      codes.push_back(codes_of_groups(one, amaxes[i]));
      continue;
    }
    const bool draws = one.spec.stochastic, given = amaxes[i][0].defined();
    codes.push_back(
        op::call<Quantize>({.x = one.t.detach(),
                            .spec = text_of(one.spec),
                            .rowwise = one.rowwise,
                            .columnwise = one.columnwise,
                            .scale = one.scale,
                            .rowwise_amax = given && one.rowwise ? std::optional(amaxes[i][0]) : std::nullopt,
                            .columnwise_amax = given && one.columnwise ? std::optional(amaxes[i][1]) : std::nullopt,
                            .sr_state = draws ? one.sr_state : std::nullopt,
                            .part = draws && one.axis >= 0 ? one.part : std::nullopt,
                            .axis = std::max(0, one.axis)}));
  }
  return codes;
}

std::vector<at::Tensor> quantize_weight_part(const at::Tensor& w, c10::string_view spec, c10::string_view parallel) {
  const Parallel p = Parallel::parse(parallel);
  const auto q = quantize_parts(
      {{.t = w, .spec = quire::QuantSpec::parse(spec), .role = "w", .columnwise = true, .axis = p.axis_of_w()}},
      p.group)[0];
  return {q.begin(), q.end()};
}

int64_t rows_of_block(const quire::QuantSpec& spec, Direction direction) {
  if (direction == Direction::rowwise && !spec.square) return 1;
  return direction == Direction::columnwise && spec.hadamard != quire::Hadamard::off
             ? 16
             : std::max<int64_t>(1, spec.row().block);
}

bool gathers_codes(const quire::QuantSpec& spec, Direction direction, const c10::SymInt& tokens) {
  if (spec.swizzled || spec.interleaved) return false;
  const int64_t block = rows_of_block(spec, direction);
  return block == 1 || (tokens % block).sym_eq(0).guard_bool(__FILE__, __LINE__);
}

namespace {

/// Whether a gather would read memory of a device by the host: gloo's does, unlike its all-to-all.
bool host_gathers(const at::Tensor& t, const Group& group) {
  return !op::on_host(t.device()) && sent_by_gloo(group.name, t.device());
}

}  // namespace

at::Tensor gather(const at::Tensor& t, const Group& group) {
  const at::Tensor started = host_gathers(t, group)
                                 ? all_to_all(at::cat(op::TensorList(static_cast<size_t>(group.size), t)), group)
                                 : all_gather({t}, group)[0];
  return wait(started, "all_gather", group);
}

bool has_own_scales(const quire::QuantSpec& spec, bool given) {
  return given && spec.nan && spec.row().scope == quire::Scope::tensor;
}

at::Tensor scale_of_whole(const at::Tensor& scale, const at::Tensor& amax, const quire::QuantSpec& spec) {
  return has_own_scales(spec, true) ? scale.add(amax.sub(amax)) : scale;  // Inf - Inf is NaN, and every other one is 0
}

DirectionBuffers gather(const DirectionBuffers& part, const quire::QuantSpec& spec, Direction direction,
                        const Group& group, bool given_scale) {
  const std::array<TokenAxis, 3> axes = token_axes(spec, direction);
  const bool own_scales = has_own_scales(spec, given_scale);
  const auto travels = [&](size_t i) { return axes[i].axis >= 0 || (own_scales && i == 1); };
  std::vector<at::Tensor> sent;
  for (size_t i = 0; i < part.size(); ++i)
    if (travels(i)) sent.push_back(part[i].flatten().view(at::kByte));  // gloo takes one dtype in a call
  agree_before(sent.back());                                            // the smallest
  const bool one_by_one = host_gathers(sent[0], group);
  std::vector<at::Tensor> gathered;
  if (!one_by_one) gathered = all_gather(sent, group);
  DirectionBuffers whole = part;
  for (size_t i = 0, next = 0; i < whole.size(); ++i) {
    if (!travels(i)) continue;
    const size_t k = next++;
    const at::Tensor bytes = one_by_one ? gather(sent[k], group) : wait(gathered[k], "all_gather", group);
    const at::Tensor there = bytes.view(part[i].scalar_type());
    // All are equal, or NaN, which is the largest.
    whole[i] = axes[i].axis >= 0 ? along(there, part[i], axes[i].axis, group) : there.amax(0, /*keepdim=*/true);
  }
  return whole;
}

op::OptionalTensor slot(const op::OptionalTensor& scales, int64_t i) {
  return scales ? std::optional(scales->narrow(0, i, 1)) : std::nullopt;
}

std::vector<c10::SymInt> sizes_with(const at::Tensor& t, int64_t times, const c10::SymInt& last) {
  auto sizes = t.sym_sizes().vec();
  sizes.front() = sizes.front() * times;
  sizes.back() = last;
  return sizes;
}

at::Tensor sum(const at::Tensor& t, const Group& group) {
  return wait(all_reduce(t, "sum", group), "all_reduce", group);
}

at::Tensor tied(const at::Tensor& t, const at::Tensor& after) {
  const Tie::Args args{.t = t, .after = after};
  return op::detail::is_traced(args) ? op::call<Tie>(args)[0] : t;
}

}  // namespace quire_torch
