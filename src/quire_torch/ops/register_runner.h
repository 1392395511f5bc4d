// What quire.runners calls: making runners of tensors, and asking the registry.
#pragma once

#include <string>
#include <vector>

#include "quire_torch/bridge/text.h"
#include "quire_torch/ops/quantize.h"

namespace quire_torch {

/// Weights of these operators come in stacks of E, which lie one after another in lists. `weights` has for each stack
/// one float tensor [E, N, K], which is quantized as w says, or for each weight the three rowwise buffers of what w
/// says, in order; `shapes` {E, N, K}; `biases` a tensor [E, N]; `input_scales` float32 [1] or [E]. An empty tensor
/// stands for none. Values are copied. Results are handles.

/// A LinearRunner of one weight.
struct RegisterLinearRunner : OpBase {
  static constexpr const char* kName = "runner_register_linear";
  using Value = int64_t;
  struct Args {
    std::string name;
    InputSpecText x;
    SpecText w;
    op::TensorList weights;
    std::vector<c10::SymInt> shapes;
    op::TensorList biases, input_scales;
    static constexpr auto kFields = std::tuple{op::field<&Args::name>("name"),
                                               op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::weights>("weights"),
                                               op::field<&Args::shapes>("shapes"),
                                               op::field<&Args::biases>("biases"),
                                               op::field<&Args::input_scales>("input_scales")};
  };
  static Value run(const Args& a);
};

/// A MoeRunner of w13 and w2, and of the shared expert's if four stacks are given.
struct RegisterMoeRunner : OpBase {
  static constexpr const char* kName = "runner_register_moe";
  using Value = int64_t;
  struct Args {
    std::string name;
    InputSpecText x;
    SpecText w;
    op::TensorList weights;
    std::vector<c10::SymInt> shapes;
    op::TensorList biases, input_scales;
    ActivationText activation;
    bool weight_on_input;
    static constexpr auto kFields = std::tuple{op::field<&Args::name>("name"),
                                               op::field<&Args::x>("x"),
                                               op::field<&Args::w>("w"),
                                               op::field<&Args::weights>("weights"),
                                               op::field<&Args::shapes>("shapes"),
                                               op::field<&Args::biases>("biases"),
                                               op::field<&Args::input_scales>("input_scales"),
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

/// Copies the weights of the runner `from` into the memory of the runner `handle` (Runner::take), and waits for it.
void take_weights(int64_t handle, int64_t from);

/// A line per registered runner: "HANDLE\tNAME\tKIND\tDEVICE\tIN_FEATURES\tOUT_FEATURES\tEXPERTS\tDESCRIPTION".
std::string list_runners();

}  // namespace quire_torch
