// A linear whose weight is sharded over the ranks of a group, and what its operands need of the others: amaxes of
// the whole tensor, and the parts of a gathered one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "quire_torch/bridge/collectives.h"
#include "quire_torch/ops/linear_bwd.h"

namespace quire_torch {

/// What the products of a sharded layer exchange with the other ranks, as a text says it:
/// "column,group=NAME,size=N[,sequence[,overlap=ring]][,reduce=R][,own_gradients]" or "row,...". column: each rank
/// has some of the outputs, row: some of the inputs. sequence: outside of the layer each rank has some of the
/// tokens, those of the first dimension.
struct Parallel {
  bool column = true;
  bool sequence = false;
  /// What is multiplied is gathered in pieces, and what is a sum is scattered in pieces (ring.h).
  bool ring = false;
  Group group;
  /// How results of parts of the contraction become their sum (reduce.h): of their dtype by the collective; or of
  /// float32 in the order of ranks, sent as they are ("float32") or as codes (a spec).
  bool sums_float32 = false;
  std::optional<quire::QuantSpec> sent_as{};
  /// Gradients of parameters that every rank has are of its own tokens, and somebody else adds them.
  bool own_gradients = false;

  static Parallel parse(std::string_view text);
  std::string to_string() const;
  /// Along which axis of the matrix an operand is sharded while it is quantized: 0 rows, 1 columns, -1 not at all.
  int axis_of_x() const { return column ? (sequence ? 0 : -1) : 1; }
  int axis_of_w() const { return column ? 0 : 1; }
  int axis_of_dy() const { return column ? 1 : (sequence ? 0 : -1); }
  bool gathers_x() const { return column && sequence; }
  bool gathers_dy() const { return !column && sequence; }
  /// Whether the product of a rank is one of several whose sum is y, or dx.
  bool sums_y() const { return !column; }
  bool sums_dx() const { return column; }
};

using OptionalParallelText = Interned<Optional<Parallel>>;

/// What is quantized, as part of a tensor that a group of ranks has.
struct Part {
  at::Tensor t;
  quire::QuantSpec spec;
  const char* role = "";  ///< for observers: "x", "w" or "dy"
  bool rowwise = true, columnwise = false;
  int axis = -1;                            ///< as Parallel::axis_of_*
  op::OptionalTensor scale = std::nullopt;  ///< of delayed scaling, or given (the option `given`): float32 [1]
  op::OptionalTensor sr_state = std::nullopt, part = std::nullopt;
  op::OptionalTensor offsets = std::nullopt;  ///< of groups of rows, each a tensor of its own, in flat buffers
};

/// Whether codes of this rank's part follow from amaxes of other ranks too. Under a static scale they do not.
bool needs_reduction(const quire::QuantSpec& spec, int axis);
/// Throws unless there is an input_scale exactly where x has the option `given`, and nothing that does not go with one.
/// fwd_scale: of delayed scaling. starts_from_x: whether backward needs x itself. what: the operator.
void check_input_scale(const OptionalRecipeText& recipe, const op::OptionalTensor& input_scale,
                       const op::OptionalTensor& fwd_scale, bool starts_from_x, const char* what);
/// The six buffers of each part, under amaxes of the whole tensor: the bytes that the whole tensor has there. One
/// collective for all amaxes.
std::vector<op::Tensors<6>> quantize_parts(const std::vector<Part>& parts, const Group& group);
/// Rowwise and columnwise amaxes above the blocks of the whole of which this is a part; undefined where none is needed.
op::Tensors<2> reduced_amaxes(const Part& part, const Group& group);
/// The larger of each amax over the group: of delayed scaling, whose amaxes are for the next step.
at::Tensor reduced(const at::Tensor& amax, int axis, const Group& group);

/// The six buffers of the part of a weight that this rank has, for the operators' w_buffers.
std::vector<at::Tensor> quantize_weight_part(const at::Tensor& w, c10::string_view spec, c10::string_view parallel);

/// Along which axis of a buffer the rows of parts follow one another, and how many of them are one step along it. axis
/// -1: all parts have the buffer alike.
struct TokenAxis {
  int axis = -1;
  int64_t rows = 1;
};
std::array<TokenAxis, 3> token_axes(const quire::QuantSpec& spec, quire::Direction direction);

/// The rows that a block of codes in `direction` covers.
int64_t rows_of_block(const quire::QuantSpec& spec, quire::Direction direction);
/// Whether the codes of parts of `tokens` rows each, one after another, are the codes of the whole.
bool gathers_codes(const quire::QuantSpec& spec, quire::Direction direction, const c10::SymInt& tokens);
/// Whether the scale of a tensor, of the ranks' rows each, can be NaN in some of them alone: where it is given, and
/// marks values that are not finite (numerics.md 1.9).
bool has_own_scales(const quire::QuantSpec& spec, bool given);
/// The static scale of the whole tensor, of that of a part: NaN if the amax of the whole is Inf, with the option `nan`.
at::Tensor scale_of_whole(const at::Tensor& scale, const at::Tensor& amax, const quire::QuantSpec& spec);
/// The three buffers of one direction of the whole, of those of each rank's rows. given_scale: for has_own_scales;
/// the scale of the whole is then NaN if one of them is.
DirectionBuffers gather(const DirectionBuffers& part, const quire::QuantSpec& spec, quire::Direction direction,
                        const Group& group, bool given_scale);
/// [size * d0, ...] of t [d0, ...].
at::Tensor gather(const at::Tensor& t, const Group& group);

/// Scale i of delayed scaling, [1]; none without them.
op::OptionalTensor slot(const op::OptionalTensor& scales, int64_t i);
/// Sizes of t when the first dimension has come together, with another last one.
std::vector<c10::SymInt> sizes_with(const at::Tensor& t, int64_t times, const c10::SymInt& last);

/// The sum over the group of what each rank has.
at::Tensor sum(const at::Tensor& t, const Group& group);

/// t, which a graph that is being traced sees after `after`; t itself where nobody traces.
at::Tensor tied(const at::Tensor& t, const at::Tensor& after);

}  // namespace quire_torch
