// All algorithms, each after those it builds on. Included once per instruction set, after its vocabulary.
// clang-format off: the order matters
#include "quire/cpu/generic/plain.inl.h"
#include "quire/cpu/generic/lines.inl.h"
#include "quire/cpu/generic/codes.inl.h"
#include "quire/cpu/generic/amax.inl.h"
#include "quire/cpu/generic/nvfp4.inl.h"
#include "quire/cpu/generic/quantize.inl.h"
#include "quire/cpu/generic/dequantize.inl.h"
#include "quire/cpu/generic/pack.inl.h"
#include "quire/cpu/generic/microkernel.inl.h"
#include "quire/cpu/generic/epilogue.inl.h"
#include "quire/cpu/generic/gemm.inl.h"
#include "quire/cpu/generic/f32_lanes.inl.h"
#include "quire/cpu/generic/column_sum.inl.h"
#include "quire/cpu/generic/produce.inl.h"
#include "quire/cpu/generic/norm.inl.h"
#include "quire/cpu/generic/activation.inl.h"
// clang-format on
