// The runners that a served model calls by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

/// Registers "served.linear" and "served.experts", with which export.py compiled its model. weights: w [N, K], w13 [E,
/// 2 I, H] and w2 [E, H, I], bfloat16. They are quantized and copied.
void register_runners(const std::vector<at::Tensor>& weights);
