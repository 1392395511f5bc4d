// The choice of a kernel: order, reasons, QUIRE_KERNEL, and what explain() says of it.
#include "inputs.h"
#include "quantized.h"
#include "quire/base/kernel_table.h"
#include "quire/device/dispatch.h"
#include "quire/operations/operations.h"

namespace quire::testing {
namespace {

struct Toy {
  int size;
};
std::string to_string(const Toy& toy) { return text("toy of ", toy.size); }

bool only_small(const Toy& toy, const Context&, Refusal* refusal) {
  return toy.size >= 10 && refused(refusal, "size ", toy.size, " is not below 10");
}
bool elsewhere(const Toy&, const Context&, Refusal* refusal) { return refused_here(refusal, "there are no tiles"); }

const std::array<KernelRow<Toy>, 2> kSmallFirst{{{"small", only_small, nullptr}, {"any", nullptr, nullptr}}};
const std::array<KernelRow<Toy>, 1> kSmallOnly{{{"small", only_small, nullptr}}};
const std::array<KernelRow<Toy>, 1> kTilesOnly{{{"tiles", elsewhere, nullptr}}};
const std::array<KernelRow<Toy>, 2> kTilesOrSmall{{{"tiles", elsewhere, nullptr}, {"small", only_small, nullptr}}};

template <size_t N>
std::string chosen(const std::array<KernelRow<Toy>, N>& rows, std::string_view forced, const Toy& toy) {
  try {
    return std::string(choose("toy", Choice<Toy>{rows, forced}, toy, host()).name);
  } catch (const Error& e) {
    return e.what();
  }
}

TEST(KernelChoice, TheFirstRowThatTakesTheProblemIsChosen) {
  EXPECT_EQ(chosen(kSmallFirst, "", {5}), "small");
  EXPECT_EQ(chosen(kSmallFirst, "", {50}), "any");
}

TEST(KernelChoice, AForcedRowIsChosenOrTheErrorSaysWhyNot) {
  EXPECT_EQ(chosen(kSmallFirst, "any", {5}), "any");
  EXPECT_EQ(chosen(kSmallFirst, "small", {50}),
            "toy: no kernel takes toy of 50 (small: size 50 is not below 10); unset QUIRE_KERNEL");
  EXPECT_EQ(chosen(kSmallOnly, "", {50}),
            "toy: no kernel takes toy of 50 (small: size 50 is not below 10); change the problem");
  EXPECT_EQ(chosen(kSmallFirst, "large", {5}),
            "toy: QUIRE_KERNEL names kernel 'large', which does not exist; use one of small, any");
}

TEST(KernelChoice, TheRemedyIsTheProblemOnlyWhereAnotherOneWouldBeTaken) {
  EXPECT_EQ(chosen(kTilesOrSmall, "", {50}),
            "toy: no kernel takes toy of 50 (tiles: there are no tiles; small: size 50 is not below 10); change the "
            "problem");
  EXPECT_EQ(chosen(kTilesOnly, "", {5}),
            "toy: no kernel takes toy of 5 (tiles: there are no tiles); move the tensors to a device that has a kernel "
            "for them, such as the CPU");
  EXPECT_EQ(chosen(kTilesOrSmall, "tiles", {5}),
            "toy: no kernel takes toy of 5 (tiles: there are no tiles); unset QUIRE_KERNEL");
}

TEST(KernelChoice, ExplainSaysOfEveryRowWhetherItTakesTheProblem) {
  const std::span<const KernelRow<Toy>> rows(kSmallFirst);
  EXPECT_EQ(explain_rows<Toy>({rows, ""}, {50}, host()), "small: size 50 is not below 10\nany: runs\n");
  EXPECT_EQ(explain_rows<Toy>({rows, ""}, {5}, host()), "small: runs\nany: not asked, small comes first\n");
  EXPECT_EQ(explain_rows<Toy>({rows, "small"}, {5}, host()), "small: runs\nany: QUIRE_KERNEL names another\n");
}

TEST(KernelChoice, ARowWhoseResultsVaryWithTheBatchIsLeftOutWhereThatIsAskedFor) {
  const std::array<KernelRow<Toy>, 2> rows{{{"small", varies<Toy, only_small>, nullptr}, {"any", nullptr, nullptr}}};
  Context invariant = host();
  invariant.batch_invariant = true;
  EXPECT_EQ(choose("toy", Choice<Toy>{rows}, {5}, host()).name, "small");
  EXPECT_EQ(choose("toy", Choice<Toy>{rows}, {5}, invariant).name, "any");
  EXPECT_EQ(explain_rows<Toy>({rows}, {50}, host()), "small: size 50 is not below 10\nany: runs\n");
  EXPECT_EQ(explain_rows<Toy>({rows}, {5}, invariant),
            "small: a row of its result depends on the other rows, and kernels=batch_invariant forbids that\n"
            "any: runs\n");
}

TEST(KernelChoice, TheSettingNamesOneRowPerOperation) {
  EXPECT_EQ(forced_kernel("", "gemm", "cpu"), "");
  EXPECT_EQ(forced_kernel("quantize:reference", "quantize", "cpu"), "reference");
  EXPECT_EQ(forced_kernel("quantize:reference", "gemm", "cpu"), "");
  EXPECT_EQ(forced_kernel("quantize:reference,gemm:generic", "gemm", "cpu"), "generic");
  EXPECT_EQ(forced_kernel("gemm:int8", "column_sum", "cpu"), "")
      << "a product of one kind does not refuse a bias gradient";
  for (const std::string_view wrong :
       {"reference", "gemm", "gemm:", ":generic", "quantise:reference", "gemm:a,,", "gemm:a;b:c,d"})
    EXPECT_THROW(forced_kernel(wrong, "gemm", "cpu"), Error) << wrong;
}

TEST(KernelChoice, TheSettingCanBeThatOfOneDevice) {
  EXPECT_EQ(forced_kernel("cpu:gemm:generic", "gemm", "cpu"), "generic");
  EXPECT_EQ(forced_kernel("cpu:gemm:generic", "gemm", "cuda"), "");
  EXPECT_EQ(forced_kernel("gemm:reference,cpu:gemm:generic", "gemm", "cpu"), "generic");
  EXPECT_EQ(forced_kernel("gemm:reference,cpu:gemm:generic", "gemm", "cuda"), "reference");
  EXPECT_EQ(forced_kernel("cpu:gemm:generic", "quantize", "cpu"), "");
  EXPECT_EQ(forced_kernel("cuda:gemm:decode", "gemm", "cpu"), "") << "also where this build has no such device";
  for (const std::string_view wrong : {"cpu:gemm", "cpu:gemm:", "cpu:matmult:generic", "gpu:gemm:generic", "::"})
    EXPECT_THROW(forced_kernel(wrong, "gemm", "cpu"), Error) << wrong;
}

TEST(KernelChoice, OfTwoOperationsOneCanBeForced) {
  for (const auto& [one, other] : {std::pair{"quantize", "dequantize"},
                                   {"norm", "norm_grad"},
                                   {"activation", "activation_grad"},
                                   {"route", "route_grad"},
                                   {"permute", "unpermute"},
                                   {"unpermute", "unpermute_dot"}})
    for (const auto& [forced, left] : {std::pair{one, other}, {other, one}}) {
      EXPECT_EQ(forced_kernel(text(forced, ":reference"), forced, "cpu"), "reference");
      EXPECT_EQ(forced_kernel(text(forced, ":reference"), left, "cpu"), "") << left << " is forced with " << forced;
    }
}

TEST(KernelChoice, ADequantizationThatNoKernelTakesSaysSo) {
  static const Device none{.name = "none", .kernels = {}};
  try {
    run_checked(DequantizeProblem{}, {.device = &none});
    FAIL() << "a kernel of another device ran";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()),
              "dequantize: this device has no kernels for it; move the tensors to one that has, such as the CPU");
  }
}

TEST(KernelChoice, TheReferenceIsTheLastRowOfEveryTable) {
  EXPECT_EQ(kernels<QuantizeProblem>().back().name, "reference");
  EXPECT_EQ(kernels<AmaxProblem>().back().name, "reference");
  EXPECT_EQ(kernels<DequantizeProblem>().back().name, "reference");
  EXPECT_EQ(kernels<GemmProblem>().back().name, "reference");
  EXPECT_EQ(kernels<ColumnSumProblem>().back().name, "reference");
}

TEST(KernelChoice, ExplainNamesTheRowsOfEachOperation) {
  const QuantizeProblem quantization{.spec = {}, .x = {}, .rowwise = {}, .columnwise = {}, .random = {}};
  const GemmProblem product{.a = {}, .b = {}, .out = {}};
  for (const std::string& lines :
       {explain(quantization), explain(DequantizeProblem{}), explain(product), explain(ColumnSumProblem{})}) {
    EXPECT_NE(lines.find("generic: "), std::string::npos) << lines;
    EXPECT_NE(lines.find("reference: "), std::string::npos) << lines;
  }
}

TEST(KernelChoice, EveryRowOfATableGivesTheSameBytes) {
  const Input x({37, 70}, DType::f32, Kind::normal, 1);
  const QuantSpec spec = QuantSpec::parse("nvfp4:rht:sr");
  const Quantized expected = quantized(reference_runner(), spec, x);
  for (const auto& row : kernels<QuantizeProblem>()) {
    Quantized actual(spec, 37, 70);
    row.run({.spec = spec,
             .x = x,
             .rowwise = actual.view(Direction::rowwise),
             .columnwise = actual.view(Direction::columnwise),
             .random = {}},
            host());
    for (const Direction d : {Direction::rowwise, Direction::columnwise})
      EXPECT_EQ(difference(expected.side(d).data, actual.side(d).data), "") << row.name;
  }
}

}  // namespace
}  // namespace quire::testing
