// Continues a text by an exported language model, without Python:
//   generate FOLDER MODEL
// FOLDER/MODEL.pt2 is one step of decoding (examples/chat/export.py): a token int64 [1, 1] and its position int64 [1]
// give logits [1, 1, vocabulary], and the step keeps what it needs of the tokens before. FOLDER/MODEL.greedy.pt has a
// prompt and the tokens with which Python continued it. The most probable token is always the next one. Prints the text
// and tokens per second. Exits 1 if a token is not that of Python.
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensors.h"

namespace {

/// What record() of export.py made.
struct Record {
  std::vector<int64_t> prompt, answer;
  int64_t end;
  at::Tensor bytes, ends;

  std::string text(int64_t token) const {
    const int64_t* at = ends.const_data_ptr<int64_t>() + token;
    const char* first = reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>());
    return {first + at[0], first + at[1]};
  }
};

std::vector<int64_t> values(const at::Tensor& tensor) {
  const at::Tensor own = tensor.contiguous();
  return {own.const_data_ptr<int64_t>(), own.const_data_ptr<int64_t>() + own.numel()};
}

Record read_record(const std::string& path) {
  const std::vector<at::Tensor> saved = read_tensors(path);
  return {values(saved.at(0)), values(saved.at(1)), saved.at(2).item<int64_t>(), saved.at(3), saved.at(4)};
}

/// The token after the one at a position.
int64_t next(torch::inductor::AOTIModelPackageLoader& step, int64_t token, int64_t position) {
  const std::vector<at::Tensor> logits = step.run({at::full({1, 1}, token), at::full({1}, position)});
  return logits.at(0).flatten().argmax().item<int64_t>();
}

/// Continues the prompt by as many tokens as Python did, or up to the token that ends an answer.
std::vector<int64_t> generate(torch::inductor::AOTIModelPackageLoader& step, const Record& record) {
  std::vector<int64_t> made;
  int64_t position = 0, token = 0;
  for (const int64_t given : record.prompt) token = next(step, given, position++);
  for (;;) {
    made.push_back(token);
    std::cout << record.text(token) << std::flush;
    if (token == record.end || made.size() >= record.answer.size()) return made;
    token = next(step, token, position++);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) throw std::runtime_error("usage: generate FOLDER MODEL");
  const std::string model = std::string(argv[1]) + "/" + argv[2];
  const c10::InferenceMode inference;
  const Record record = read_record(model + ".greedy.pt");
  torch::inductor::AOTIModelPackageLoader step(model + ".pt2");

  const auto begin = std::chrono::steady_clock::now();
  const std::vector<int64_t> made = generate(step, record);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  // The tokens of the prompt are read one by one too.
  const double steps = static_cast<double>(record.prompt.size() + made.size() - 1);
  const bool equal = made == record.answer;
  std::cout << '\n'
            << argv[2] << ": " << made.size() << " tokens" << (equal ? ", equal to Python" : ", DIFFERENT from Python")
            << ", " << steps / seconds.count() << " tokens/s\n";
  return equal ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
