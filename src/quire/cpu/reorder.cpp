#include "quire/cpu/reorder.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "quire/base/parallel.h"
#include "quire/spec/interleave.h"
#include "quire/spec/scale_index.h"

namespace quire::cpu {
namespace {

/// Lines of bytes, one after the other, or across: the same byte of all lines, then the next.
struct PlainBytes {
  int64_t lines, bytes;
  bool across;
};

/// Copies from the one that is const to the other.
inline void move(const uint8_t* from, uint8_t* to) { *to = *from; }
inline void move(uint8_t* to, const uint8_t* from) { *to = *from; }
inline void move_word(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, kInterleavedBytes); }
inline void move_word(uint8_t* to, const uint8_t* from) { std::memcpy(to, from, kInterleavedBytes); }

/// Bytes of a line that are moved before those of the next: a line of a cache.
constexpr int64_t kChunk = 64;

/// Moves up to kChunk bytes of 16 lines into their tiles, or out of them: the one that is read is const.
template <class Plain, class Tiles>
void move_chunk(const PlainBytes& p, int64_t first_line, int64_t first_byte, Plain* plain, Tiles* tiles) {
  const int64_t lines = std::min(first_line + kInterleavedLines, p.lines);
  const int64_t bytes = std::min(first_byte + kChunk, p.bytes), words = bytes / kInterleavedBytes * kInterleavedBytes;
  const auto tile = [&](int64_t line, int64_t byte) { return tiles + interleaved_offset(line, byte, p.bytes); };
  if (p.across) {
    for (int64_t byte = first_byte; byte < bytes; byte += kInterleavedBytes)
      for (int64_t line = first_line; line < lines; ++line)
        for (int64_t b = byte; b < std::min(byte + kInterleavedBytes, bytes); ++b)
          move(plain + b * p.lines + line, tile(line, b));
    return;
  }
  for (int64_t line = first_line; line < lines; ++line) {
    Plain* const from = plain + line * p.bytes;
    for (int64_t byte = first_byte; byte < words; byte += kInterleavedBytes) move_word(from + byte, tile(line, byte));
    for (int64_t byte = words; byte < bytes; ++byte) move(from + byte, tile(line, byte));
  }
}

template <class Plain, class Tiles>
void move_lines(const PlainBytes& p, Plain* plain, Tiles* tiles) {
  constexpr int64_t kGrain = int64_t{1} << 16;
  const int64_t size = kInterleavedLines * round_up(p.bytes, kInterleavedBytes);
  parallel_for(ceil_div(p.lines, kInterleavedLines), ceil_div(kGrain, size), [&](int64_t begin, int64_t end) {
    if constexpr (!std::is_const_v<Tiles>)
      std::memset(tiles + begin * size, 0, static_cast<size_t>((end - begin) * size));
    for (int64_t line = begin * kInterleavedLines; line < end * kInterleavedLines; line += kInterleavedLines)
      for (int64_t byte = 0; byte < p.bytes; byte += kChunk) move_chunk(p, line, byte, plain, tiles);
  });
}

void move_lines(const QuantSpec& from, const PlainBytes& p, const void* source, void* out) {
  const auto* const read = static_cast<const uint8_t*>(source);
  auto* const written = static_cast<uint8_t*>(out);
  from.interleaved ? move_lines(p, written, read) : move_lines(p, read, written);
}

QuantSpec plain_order(const QuantSpec& spec) { return spec.interleaved ? spec.reordered() : spec; }

/// Memory of one side in plain order.
struct PlainSide {
  std::vector<uint8_t> data;
  std::vector<float> scale;  ///< whatever its dtype is: aligned for all

  PlainSide(const QuantSpec& spec, const Shape<int64_t>& shape, Direction direction) {
    const Buffers<int64_t> b = buffers<int64_t>(plain_order(spec), shape, direction);
    const auto bytes = [](const Buffer<int64_t>& buffer) {
      return static_cast<size_t>(product(buffer.sizes, 0, buffer.sizes.size()) * size_of(buffer.dtype));
    };
    data.resize(std::max<size_t>(bytes(b.data), 1));
    scale.resize(bytes(b.scale) / sizeof(float) + 1);
  }
};

Operand operand_of(const QuantSpec& spec, Direction direction, const Shape<int64_t>& shape) {
  const bool columnwise = direction == Direction::columnwise;
  return {.spec = spec,
          .direction = direction,
          .outer = shape[columnwise ? 1 : 0],
          .contraction = columnwise ? columnwise_tokens(spec, shape[0]) : shape[1]};
}

}  // namespace

void reorder(const ReorderProblem& problem, const Context&) {
  const Operand& o = problem.from;
  if (!has_byte_scales(o.spec) && o.scale && problem.scale) {  // there is one even of no elements
    const Shape<int64_t> sizes = detail::scale_sizes(o.spec, o.direction, o.outer, o.contraction);
    std::memcpy(problem.scale, o.scale, sizeof(float) * static_cast<size_t>(product(sizes, 0, sizes.size())));
  }
  if (o.outer == 0 || o.contraction == 0) return;
  const bool across = blocks_first(plain_order(o.spec), o.direction);
  move_lines(o.spec, {o.outer, ceil_div(o.contraction, o.spec.packed() ? 2 : 1), across}, o.data, problem.data);
  if (has_byte_scales(o.spec))
    move_lines(o.spec, {o.outer, block_count(o.spec, o.contraction), across}, o.scale, problem.scale);
}

void quantize_interleaved(const QuantizeProblem& problem, void (*plain)(const QuantizeProblem&)) {
  const Shape<int64_t> shape{problem.x.rows, problem.x.cols};
  QuantizeProblem p = problem;
  p.spec = plain_order(p.spec);
  PlainSide rowwise(p.spec, shape, Direction::rowwise), columnwise(p.spec, shape, Direction::columnwise);
  const auto reordered = [&](Side& wanted, PlainSide& memory) {
    if (wanted.data) wanted.data = memory.data.data(), wanted.scale = memory.scale.data();
  };
  reordered(p.rowwise, rowwise), reordered(p.columnwise, columnwise);
  plain(p);
  for (const Direction d : {Direction::rowwise, Direction::columnwise}) {
    const Side &from = d == Direction::rowwise ? p.rowwise : p.columnwise,
               &to = d == Direction::rowwise ? problem.rowwise : problem.columnwise;
    if (!to.data) continue;
    Operand o = operand_of(p.spec, d, shape);
    o.data = from.data, o.scale = from.scale, o.amax = from.amax;
    reorder({.from = o, .data = to.data, .scale = to.scale}, host());
  }
}

void dequantize_interleaved(const DequantizeProblem& problem, void (*plain)(const DequantizeProblem&)) {
  const Shape<int64_t> shape{problem.rows, problem.cols};
  PlainSide memory(problem.spec, shape, problem.direction);
  Operand o = operand_of(problem.spec, problem.direction, shape);
  o.data = problem.data, o.scale = problem.scale, o.amax = problem.amax;
  reorder({.from = o, .data = memory.data.data(), .scale = memory.scale.data()}, host());
  DequantizeProblem p = problem;
  p.spec = plain_order(p.spec), p.data = memory.data.data(), p.scale = memory.scale.data();
  plain(p);
}

}  // namespace quire::cpu
