#include "quire/cuda/kernels/tile_quantize.cuh"

using namespace quire;

QUIRE_TILE_KERNELS(fp8_tensor, {.family = Family::fp8_tensor})
QUIRE_TILE_KERNELS(fp8_tensor_e5m2, {.family = Family::fp8_tensor, .element = Format::e5m2})
QUIRE_TILE_KERNELS(fp8_block, {.family = Family::fp8_block})
QUIRE_TILE_KERNELS(fp8_block_e5m2, {.family = Family::fp8_block, .element = Format::e5m2})
QUIRE_TILE_KERNELS(mxfp8, {.family = Family::mxfp8})
QUIRE_TILE_KERNELS(mxfp8_e5m2, {.family = Family::mxfp8, .element = Format::e5m2})
QUIRE_TILE_KERNELS(fp8_block_2d, {.family = Family::fp8_block, .square = true})
QUIRE_TILE_KERNELS(fp8_block_2d_e5m2, {.family = Family::fp8_block, .element = Format::e5m2, .square = true})
QUIRE_TILE_KERNELS(mxfp8_2d, {.family = Family::mxfp8, .square = true})
QUIRE_TILE_KERNELS(mxfp8_2d_e5m2, {.family = Family::mxfp8, .element = Format::e5m2, .square = true})
QUIRE_TILE_KERNELS(fp8_row, {.family = Family::fp8_row})
QUIRE_TILE_KERNELS(fp8_row_e5m2, {.family = Family::fp8_row, .element = Format::e5m2})
