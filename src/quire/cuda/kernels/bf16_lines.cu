// Codes of an operand of one tensor or of groups, decoded to bfloat16 in memory.
#include "quire/cuda/kernels/bf16_lines.cuh"

#include "quire/cuda/kernels/bf16_codes.cuh"
#include "quire/cuda/kernels/group_tiles.cuh"

using namespace quire;
using namespace quire::cuda;

namespace {

constexpr int kLines = static_cast<int>(kDecodeLines);
using Reader = UnitReader<kLines>;
constexpr int kSteps = static_cast<int>(kDecodeNumbers) / Reader::kDepth;
constexpr int kAtOnce = 4;  ///< steps, whose codes are read before the first of them is decoded

/// Numbers of kLines lines, from step `first` on. `to`: of the group.
__device__ void decode_tile(OperandValues v, const UnitLayout& layout, int64_t line, int first, const Bf16Lines& to) {
  // The reader counts steps from the first one on, and its codes follow each other from where it begins.
  v.from.data = static_cast<const uint8_t*>(v.from.data) +
                first * (layout.packed ? Reader::kDepth / 8 : Reader::kDepth / 4) * layout.word_step;
  Reader reader(v, layout, line);
  const Bf16Decoder decoder = layout.decoder;  // in registers: stores may change shared memory, for all that is known
#pragma unroll 1
  for (int begin = first; begin < first + kSteps; begin += kAtOnce) {
    RawUnit raw[kAtOnce][Reader::kEach];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) reader.read(raw[s], begin + s);
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
#pragma unroll
      for (int i = 0; i < Reader::kEach; ++i) {
        const int64_t l = line + reader.line(i), k = int64_t{begin + s} * Reader::kDepth + reader.chunk(i) * kUnit;
        if (l < v.from.outer && k < v.contraction)
          *reinterpret_cast<uint4*>(to.data + l * to.row_bytes + k * 2) = decoder(raw[s][i]);
      }
  }
}

/// The tiles of this block. kColumns: groups are contracted.
template <bool kColumns>
__device__ void decode(const DecodeJob& job) {
  __shared__ alignas(UnitLayout) unsigned char memory[sizeof(UnitLayout)];
  auto& layout = reinterpret_cast<UnitLayout&>(memory);
  using Tiles =
      std::conditional_t<kColumns, GroupTiles<kDecodeNumbers, kDecodeLines>, GroupTiles<kDecodeLines, kDecodeNumbers>>;
  Tiles tiles(job.from.groups, kColumns ? job.from.all.outer : job.from.all.contraction);
  for (int64_t t = blockIdx.x; tiles.find(t); t += gridDim.x) {
    const GroupPlace place = job.from.groups[tiles.group];
    const OperandValues v(operand_of(job.from, tiles.group, place));
    __syncthreads();  // nobody reads the layout of the tile before any more
    if (threadIdx.x == 0) layout = UnitLayout(v, has_byte_scales(v.from.spec));
    __syncthreads();
    const int64_t line = kColumns ? tiles.col : tiles.row, number = kColumns ? tiles.row : tiles.col;
    decode_tile(v, layout, line, static_cast<int>(number / Reader::kDepth), group_of(job.to, job.from, tiles.group));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(2 * kDecodeLines, kDecodeBlocks)
    decode_operand(const __grid_constant__ DecodeJob job) {
  if (job.from.all.direction == Direction::columnwise)
    decode<true>(job);
  else
    decode<false>(job);
}
