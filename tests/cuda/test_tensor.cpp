// The words of the tensor cores on integers, where every order of sums gives the same, and asynchronous copies.
#include <gtest/gtest.h>

#include <random>

#include "cuda/device_arrays.h"
#include "quire/format/codec.h"
#include "quire/format/half.h"

namespace quire::testing {
namespace {

class Tensor : public ::testing::TestWithParam<uint64_t> {
 protected:
  template <class... T>
  void run(const std::string& name, T... arguments) {
    launch(kernel_of("tensor.ptx", name), {.block = {32}, .seed = GetParam()}, memory_, arguments...);
  }
  std::vector<int> integers(std::size_t count) {
    std::vector<int> all(count);
    for (int& x : all) x = static_cast<int>(dice_() % 17) - 8;
    return all;
  }
  template <class T, class F>
  T* array(const std::vector<int>& values, F&& code) {
    std::vector<T> all;
    for (const int x : values) all.push_back(static_cast<T>(code(static_cast<float>(x))));
    return device_array(memory_, all);
  }

  emulator::HostMemory memory_;
  std::mt19937 dice_{3};
};

INSTANTIATE_TEST_SUITE_P(Orders, Tensor, ::testing::Values(0, 1, 2));

TEST_P(Tensor, ProductsOfBfloat16AreThoseOfIntegers) {
  const std::vector<int> a = integers(16 * 16), b = integers(16 * 8), d = integers(16 * 8);
  auto* out = array<float>(d, [](float x) { return x; });
  run("product_of_bf16", array<uint16_t>(a, f32_to_bf16), array<uint16_t>(b, f32_to_bf16), out);
  for (unsigned i = 0; i < 16; ++i)
    for (unsigned j = 0; j < 8; ++j) {
      int sum = d[i * 8 + j];
      for (unsigned k = 0; k < 16; ++k) sum += a[i * 16 + k] * b[k * 8 + j];
      EXPECT_EQ(out[i * 8 + j], static_cast<float>(sum)) << i << ", " << j;
    }
}

TEST_P(Tensor, ProductsOfCodesThatCopiesBringAheadAreThoseOfIntegers) {
  for (const int columns : {32, 16, 64, 96, 144, 160, 224, 7}) {
    const auto stride = static_cast<unsigned>(columns + 15) / 16 * 16;
    const std::vector<int> a = integers(16 * stride), b = integers(8 * stride);
    const auto code = [](float x) { return encode(Format::e4m3, x); };
    auto* out = array<float>(integers(16 * 8), [](float x) { return x; });
    run("product_of_e4m3", array<uint8_t>(a, code), array<uint8_t>(b, code), out, columns, static_cast<int>(stride));
    for (unsigned i = 0; i < 16; ++i)
      for (unsigned j = 0; j < 8; ++j) {
        int sum = 0;
        for (unsigned k = 0; k < static_cast<unsigned>(columns); ++k) sum += a[i * stride + k] * b[j * stride + k];
        EXPECT_EQ(out[i * 8 + j], static_cast<float>(sum)) << i << ", " << j << " of " << columns;
      }
  }
}

TEST_P(Tensor, ACopyThatIsNotWaitedForIsFound) {
  const std::pair<const char*, const char*> faults[] = {
      {"reads_before_a_copy_ends", "an asynchronous copy is under way"},
      {"ends_before_its_copies", "ends before its asynchronous copies"},
      {"reads_a_copy_of_another_lane", "without a barrier in between"},
  };
  auto* a = array<uint8_t>(integers(512), [](float x) { return x + 8; });
  auto* d = array<float>(integers(32), [](float x) { return x; });
  for (const auto& [kernel, text] : faults) try {
      run(kernel, a, a, d, 0, 0);
      ADD_FAILURE() << kernel;
    } catch (const emulator::Error& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
}

}  // namespace
}  // namespace quire::testing
