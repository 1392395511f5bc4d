#include "quire/cuda/kernels/tile_quantize.cuh"

using namespace quire;

QUIRE_TILE_KERNELS(mxfp4, {.family = Family::mxfp4, .element = Format::e2m1})
QUIRE_TILE_KERNELS(nvfp4, {.family = Family::nvfp4, .element = Format::e2m1})
QUIRE_TILE_KERNELS(nvfp4_2d, {.family = Family::nvfp4, .element = Format::e2m1, .square = true})
QUIRE_TILE_KERNELS(nvfp4_row, {.family = Family::nvfp4, .element = Format::e2m1, .row_scaled = true})
QUIRE_TILE_KERNELS(nvfp4_4over6, {.family = Family::nvfp4, .element = Format::e2m1, .four_over_six = FourOverSix::mae})
QUIRE_TILE_KERNELS(nvfp4_2d_4over6, {.family = Family::nvfp4,
                                     .element = Format::e2m1,
                                     .square = true,
                                     .four_over_six = FourOverSix::mae})
QUIRE_TILE_KERNELS(nvfp4_row_4over6, {.family = Family::nvfp4,
                                      .element = Format::e2m1,
                                      .row_scaled = true,
                                      .four_over_six = FourOverSix::mae})
QUIRE_TILE_KERNELS(nvfp4_sr, {.family = Family::nvfp4, .element = Format::e2m1, .stochastic = true})
QUIRE_TILE_KERNELS(nvfp4_rht, {.family = Family::nvfp4, .element = Format::e2m1, .hadamard = Hadamard::signs})
QUIRE_TILE_KERNELS(nvfp4_rht_sr,
                   {.family = Family::nvfp4, .element = Format::e2m1, .hadamard = Hadamard::signs, .stochastic = true})
