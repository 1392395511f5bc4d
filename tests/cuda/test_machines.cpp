// Which row of a table runs on which machine: asked of descriptions of machines.
#include <fstream>
#include <iterator>

#include "cuda/cublaslt_case.h"

namespace quire::testing {
namespace {

/// The rows that run the products of a Linear: "cublaslt", or "f: cublaslt; d, w: decode" where they differ.
std::string rows_that_run(LtCases& cases, const std::array<GemmProblem, 3>& products) {
  std::array<std::string_view, 3> rows;
  for (size_t i = 0; i < 3; ++i)
    rows[i] = choose("gemm", Choice<GemmProblem>{kernels<GemmProblem>(cases.twins().device)}, products[i],
                     cases.twins().device)
                  .name;
  if (rows[0] == rows[1] && rows[1] == rows[2]) return std::string(rows[0]);
  std::string cell;
  for (size_t i = 0; i < 3; ++i) {
    const bool same_as_before = i > 0 && rows[i] == rows[i - 1], same_as_next = i < 2 && rows[i] == rows[i + 1];
    cell += text(i == 0 ? "" : same_as_before ? ", " : "; ", "fdw"[i], same_as_next ? "" : text(": ", rows[i]));
  }
  return cell;
}

/// The products of a Linear of 4096 inputs and outputs, of which only what rows ask for is there.
std::array<GemmProblem, 3> products_of(const std::array<std::string_view, 3>& specs, int64_t tokens, DType dtype,
                                       bool groups) {
  constexpr int64_t features = 4096;
  const auto operand = [&](size_t role, Direction d) {
    const int64_t rows = role == 1 ? features : tokens;
    Operand o{.spec = QuantSpec::parse(specs[role]),
              .direction = d,
              .outer = d == kRows ? rows : features,
              .contraction = d == kRows ? features : rows};
    if (groups && role != 1) o.groups = {.count = 8, .rows = tokens, .ends = {&features, 8, true}};
    return o;
  };
  const auto product = [&](const Operand& a, const Operand& b) {
    return GemmProblem{.a = a, .b = b, .out = {nullptr, dtype, a.outer, b.outer, b.outer}};
  };
  return {product(operand(0, kRows), operand(1, kRows)), product(operand(2, kRows), operand(1, kColumns)),
          product(operand(2, kColumns), operand(0, kColumns))};
}

TEST(Products, RunOnEachChipByTheRowsThatTheDocumentNames) {
  if (on_gpu()) GTEST_SKIP() << "other machines are described on the emulator";
  LtCases cases(6);
  struct Line {
    const char* what;
    std::array<std::string_view, 3> specs;
    int64_t tokens = 512;
    bool groups = false;
    int only = -1;  ///< the product that is asked for
  };
  constexpr std::array lines{
      Line{"at most 16 tokens, f", {"fp8_tensor", "fp8_tensor", "fp8_row"}, 16, false, 0},
      Line{"17 to 64 tokens, f of `fp8_tensor`", {"fp8_tensor", "fp8_tensor", "fp8_row"}, 64, false, 0},
      Line{"17 to 64 tokens, f of two families", {"nvfp4", "mxfp8", "fp8_row"}, 64, false, 0},
      Line{"at most 64 tokens, d but of `mxfp8` w", {"mxfp8", "nvfp4", "fp8_row:e5m2"}, 64, false, 1},
      Line{"at most 16 tokens, d of `mxfp8` w", {"mxfp8", "mxfp8", "mxfp8"}, 16, false, 1},
      Line{"8 groups of together at most 128 tokens, f", {"fp8_row", "mxfp4", "fp8_row"}, 128, true, 0},
      Line{"`fp8_tensor`", {"fp8_tensor", "fp8_tensor", "fp8_tensor:e5m2"}},
      Line{"`fp8_row`", {"fp8_row", "fp8_row", "fp8_row:e5m2"}},
      Line{"`fp8_block`, w `128x128`", {"fp8_block", "fp8_block:128x128", "fp8_block"}},
      Line{"`mxfp8`", {"mxfp8", "mxfp8", "mxfp8"}},
      Line{"`mxfp4`", {"mxfp4", "mxfp4", "mxfp4"}},
      Line{"`nvfp4`, w `16x16`", {"nvfp4:rht", "nvfp4:16x16", "nvfp4:rht:sr"}},
      Line{"`nvfp4:row_scaled` of x and dy", {"nvfp4:row_scaled", "nvfp4", "nvfp4:row_scaled"}},
      Line{"two families", {"nvfp4", "mxfp8", "fp8_tensor"}},
      Line{"groups of tokens, `fp8_block`", {"fp8_block", "fp8_block:128x128", "fp8_block"}, 512, true},
      Line{"groups of tokens, any other spec", {"fp8_tensor", "fp8_tensor", "fp8_tensor"}, 512, true},
  };
  std::string table = "| operands | 8.0 | 8.9 | 9.0 | 10.0, 10.3 | 12.0 |\n|---|---|---|---|---|---|\n";
  for (const Line& line : lines) {
    table += text("| ", line.what);
    for (const int number : {80, 89, 90, 100, 120}) {
      cases.pretend(chip(number));
      auto products = products_of(line.specs, line.tokens, DType::bf16, line.groups);
      if (line.only >= 0) products.fill(products[static_cast<size_t>(line.only)]);
      table += text(" | ", rows_that_run(cases, products));
      if (number != 100) continue;
      cases.pretend(chip(103));
      EXPECT_TRUE(table.ends_with(rows_that_run(cases, products))) << line.what << " on 10.3";
    }
    table += " |\n";
  }
  std::ifstream file(QUIRE_DOCS_DIR "/numerics.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(page.find(table), std::string::npos) << "numerics.md 7.6 should have this table:\n" << table;
}

TEST(Products, AreExplainedRowByRow) {
  if (on_gpu()) GTEST_SKIP() << "other machines are described on the emulator";
  LtCases cases(9);
  const auto explained = [&](int number, std::string_view forced) {
    cases.pretend(chip(number));
    const GemmProblem p = products_of({"fp8_tensor", "fp8_tensor", "fp8_tensor"}, 512, DType::bf16, false)[0];
    return explain_rows(Choice<GemmProblem>{kernels<GemmProblem>(cases.twins().device), forced}, p,
                        cases.twins().device);
  };
  const std::string few =
      "skinny: takes at most 64 rows of a, or 16 for each group on average, but a has 512\n"
      "few_rows: takes at most 16 rows of a, which can have 512; decode reads their codes less often\n";
  EXPECT_TRUE(explained(90, "").starts_with(few + "cublaslt: runs\n")) << explained(90, "");
  EXPECT_TRUE(explained(80, "").starts_with(few +
                                            "cublaslt: multiplies fp8_tensor on compute capability 8.9 and newer, "
                                            "but the device has 8.0\n"))
      << explained(80, "");
  EXPECT_NE(explained(90, "decode32").find("cublaslt: QUIRE_KERNEL names another\n"), std::string::npos);
  EXPECT_NE(explained(90, "decode32").find("decode32: runs\n"), std::string::npos);
}

}  // namespace
}  // namespace quire::testing
