// What quire.runners calls: making runners of tensors, and asking the registry.
#pragma once

#include <string>
#include <vector>

#include "quire_torch/bridge/text.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// Weights of these operators, one or a stack of E: a float tensor [E, N, K], which is quantized as w says, or for each
/// the three rowwise buffers of what w says, in order. `shape` is {E, N, K}. Values are copied.
/// Results are handles.

/// A LinearRunner of one weight; bias [N].
struct RegisterLinearRunner : OpBase {
  static constexpr const char* kName = "runner_register_linear";
  using Value = int64_t;
  struct Args {
    std::string name;
    SpecText x, w;
    op::TensorList weight;
    std::vector<c10::SymInt> shape;
    std::optional<at::Tensor> bias;
    static constexpr auto kFields = std::tuple{op::field<&Args::name>("name"),   op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),         op::field<&Args::weight>("weight"),
                                               op::field<&Args::shape>("shape"), op::field<&Args::bias>("bias")};
  };
  static Value run(const Args& a);
};

/// A MoeRunner; biases [E, N].
struct RegisterMoeRunner : OpBase {
  static constexpr const char* kName = "runner_register_moe";
  using Value = int64_t;
  struct Args {
    std::string name;
    SpecText x, w;
    op::TensorList w13, w2;
    std::vector<c10::SymInt> w13_shape, w2_shape;
    std::optional<at::Tensor> w13_bias, w2_bias;
    ActivationText activation;
    bool weight_on_input;
    static constexpr auto kFields = std::tuple{op::field<&Args::name>("name"),
                                               op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::w13>("w13"),
                                               op::field<&Args::w2>("w2"),
                                               op::field<&Args::w13_shape>("w13_shape"),
                                               op::field<&Args::w2_shape>("w2_shape"),
                                               op::field<&Args::w13_bias>("w13_bias"),
                                               op::field<&Args::w2_bias>("w2_bias"),
                                               op::field<&Args::activation>("activation"),
                                               op::field<&Args::weight_on_input>("weight_on_input")};
  };
  static Value run(const Args& a);
};

/// A PythonRunner; experts = 0: linear.
struct RegisterPythonRunner : OpBase {
  static constexpr const char* kName = "runner_register_python";
  using Value = int64_t;
  struct Args {
    std::string name;
    int64_t function, in_features, out_features, experts;
    std::string device, description;
    static constexpr auto kFields = std::tuple{op::field<&Args::name>("name"),
                                               op::field<&Args::function>("function"),
                                               op::field<&Args::in_features>("in_features"),
                                               op::field<&Args::out_features>("out_features"),
                                               op::field<&Args::experts>("experts"),
                                               op::field<&Args::device>("device"),
                                               op::field<&Args::description>("description")};
  };
  static Value run(const Args& a);
};

/// A line per registered runner: "HANDLE\tNAME\tKIND\tDEVICE\tIN_FEATURES\tOUT_FEATURES\tEXPERTS\tDESCRIPTION".
std::string list_runners();

}  // namespace quire_torch
