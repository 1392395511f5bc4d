// Tensors that Python saved.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

/// A list of tensors that torch.save wrote. Throws std::runtime_error if there is no such file.
std::vector<at::Tensor> read_tensors(const std::string& path);
