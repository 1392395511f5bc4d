// The product, without the lanes it is computed in. Included after a vocabulary.
// clang-format off: the order matters
#include "quire/cpu/generic/plain.inl.h"
#include "quire/cpu/generic/lines.inl.h"
#include "quire/cpu/generic/codes.inl.h"
#include "quire/cpu/generic/slab_codes.inl.h"
#include "quire/cpu/generic/quads.inl.h"
#include "quire/cpu/generic/slab_scales.inl.h"
#include "quire/cpu/generic/microkernel.inl.h"
#include "quire/cpu/generic/epilogue.inl.h"
#include "quire/cpu/generic/gemm.inl.h"
// clang-format on
