// A library with a runner of its own: y = scale * x. Loading it registers the runner as "consumer.scale"; C functions
// register more.
#include <cstring>
#include <memory>
#include <stdexcept>

#include "quire/format/element.h"
#include "quire/runner/registry.h"

namespace {

class Scale final : public quire::Runner {
 public:
  Scale(int64_t features, float factor, const char* device)
      : Runner({.device = device, .in_features = features, .out_features = features, .description = "y = scale * x"}),
        factor_(factor) {}

  void run(const quire::RunnerCall& call) override {
    if (factor_ == 0) throw std::runtime_error("consumer: a factor of 0 is no use");
    for (int64_t r = 0; r < call.x.rows; ++r)
      for (int64_t c = 0; c < call.x.cols; ++c)
        quire::store_element(call.out.data, call.out.dtype, r * call.out.row_stride + c,
                             factor_ * quire::load_element(call.x.data, call.x.dtype, r * call.x.row_stride + c));
  }

 private:
  float factor_;
};

const int64_t at_load = quire::register_runner(std::make_shared<Scale>(8, 2.0f, "cpu"), "consumer.scale");

}  // namespace

extern "C" {
int64_t consumer_handle() { return at_load; }
int64_t consumer_register(int64_t features, float factor, const char* device) {
  return quire::register_runner(std::make_shared<Scale>(features, factor, device));
}
}
