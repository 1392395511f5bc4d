#include "runners.h"

#include <memory>
#include <utility>

#include "quire/runner/linear_runner.h"
#include "quire/runner/moe_runner.h"
#include "quire/runner/registry.h"

namespace {

/// A weight [N, K], or those of E experts [E, N, K], quantized for products.
quire::PreparedWeight prepared(const at::Tensor& w) {
  const at::Tensor rows = w.reshape({-1, w.size(-1)}).contiguous();
  const quire::Matrix view{rows.const_data_ptr(), quire::DType::bf16, rows.size(0), rows.size(1), rows.size(1)};
  return {view, quire::QuantSpec::parse("nvfp4"), {.count = w.dim() == 3 ? w.size(0) : 1}};
}

}  // namespace

void register_runners(const std::vector<at::Tensor>& weights) {
  const at::Tensor &w = weights.at(0), &w13 = weights.at(1), &w2 = weights.at(2);
  const quire::QuantSpec x = quire::QuantSpec::parse("nvfp4");
  quire::register_runner(std::make_shared<quire::LinearRunner>(prepared(w), x), "served.linear");

  const quire::MoeOptions options{.x = x, .activation = quire::Activation::parse("swiglu")};
  quire::register_runner(std::make_shared<quire::MoeRunner>(quire::Experts{prepared(w13), prepared(w2)}, options),
                         "served.experts");
}
