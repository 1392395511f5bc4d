// All algorithms, each after those it builds on. Included once per instruction set, after its vocabulary.
// clang-format off: the order matters
#include "quire/cpu/generic/product.inl.h"
#include "quire/cpu/generic/f32_lanes.inl.h"
#include "quire/cpu/generic/amax.inl.h"
#include "quire/cpu/generic/values.inl.h"
#include "quire/cpu/generic/encode.inl.h"
#include "quire/cpu/generic/scales.inl.h"
#include "quire/cpu/generic/nvfp4.inl.h"
#include "quire/cpu/generic/quantize_rows.inl.h"
#include "quire/cpu/generic/quantize_columns.inl.h"
#include "quire/cpu/generic/quantize.inl.h"
#include "quire/cpu/generic/decode_tables.inl.h"
#include "quire/cpu/generic/dequantize.inl.h"
#include "quire/cpu/generic/column_sum.inl.h"
#include "quire/cpu/generic/produce.inl.h"
#include "quire/cpu/generic/norm.inl.h"
#include "quire/cpu/generic/activation.inl.h"
// clang-format on
