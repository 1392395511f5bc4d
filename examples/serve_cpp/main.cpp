// Serves exported models without Python:
//   serve FOLDER MODEL...
// loads FOLDER/MODEL.pt2, runs it on the inputs of FOLDER/MODEL.cases.pt and compares each output, bit for bit, with
// that of Python (export.py). Exits 1 if one differs. A model with FOLDER/MODEL.weights.pt calls runners, which are
// registered from it first.
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "runners.h"
#include "tensors.h"

namespace {

/// Runs all cases of a model; true if every output is exactly the expected one.
bool serve(const std::string& folder, const std::string& name) {
  if (const std::string weights = folder + "/" + name + ".weights.pt"; std::ifstream(weights))
    register_runners(read_tensors(weights));
  torch::inductor::AOTIModelPackageLoader model(folder + "/" + name + ".pt2");
  const std::vector<at::Tensor> cases = read_tensors(folder + "/" + name + ".cases.pt");
  bool all_equal = true;
  for (size_t i = 0; i + 1 < cases.size(); i += 2) {
    const std::vector<at::Tensor> outputs = model.run({cases[i]});
    const bool equal = at::equal(outputs.at(0), cases[i + 1]);
    std::cout << name << ": batch " << cases[i].size(0) << " -> " << outputs[0].sizes()
              << (equal ? ", equal to Python\n" : ", DIFFERS from Python\n");
    all_equal = all_equal && equal;
  }
  return all_equal;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: serve FOLDER MODEL...");
  const c10::InferenceMode inference;
  bool all_equal = true;
  for (int i = 2; i < argc; ++i) all_equal = serve(argv[1], argv[i]) && all_equal;
  return all_equal ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
