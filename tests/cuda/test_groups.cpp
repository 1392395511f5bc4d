// Groups of rows, whose ends lie on the device: quantized, measured and decoded there as the CPU does it.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "cuda/grammar.h"
#include "cuda/twins.h"
#include "quire/spec/block_codes.h"
#include "quire/spec/flat_counts.h"

namespace quire::testing {
namespace {

/// Sizes of groups: unequal, empty, few of many.
const std::vector<std::vector<int64_t>> kSizes{{5, 0, 33, 16}, {0, 0}, {64}, {1, 2, 3, 4, 5, 6, 7, 8, 9}, {17, 40}};
const std::vector<std::string> kSpecs{"fp8_tensor",
                                      "fp8_tensor:given",
                                      "fp8_row",
                                      "fp8_block",
                                      "mxfp8",
                                      "mxfp8:32x32:swizzled",
                                      "mxfp4",
                                      "nvfp4",
                                      "nvfp4:rht",
                                      "nvfp4:16x16:swizzled",
                                      "nvfp4:row_scaled",
                                      "nvfp4:sr",
                                      "nvfp4:given",
                                      "mxfp8:interleaved"};

class GroupsCase {
 public:
  GroupsCase(Twins& twins, const std::vector<int64_t>& sizes, const std::string& text, int seed)
      : twins_(twins), dice_(static_cast<unsigned>(seed)) {
    int64_t end = 0;
    std::vector<int64_t> ends;
    for (const int64_t size : sizes) ends.push_back(end += size);
    const int64_t beyond = seed % 3;  // rows of no group
    groups = {.count = std::ssize(sizes), .rows = end + beyond, .what = "quantize: offsets"};
    groups.ends = seed % 2 ? Integers{twins.array(std::vector<int32_t>(ends.begin(), ends.end())), std::ssize(ends)}
                           : Integers{twins.array(ends), std::ssize(ends), true};
    spec = QuantSpec::parse(text);
    x = matrix(groups.rows, kCols, seed % 2 ? DType::bf16 : DType::f32);
  }

  Matrix matrix(int64_t rows, int64_t cols, DType dtype) {
    const int64_t stride = cols + 3;
    Matrix m{twins_.room<std::byte>(rows * stride * size_of(dtype)), dtype, rows, cols, stride};
    std::normal_distribution<float> values;
    for (int64_t i = 0; i < rows * stride; ++i) store_element(const_cast<void*>(m.data), dtype, i, values(dice_));
    return m;
  }
  /// A scale for each group, if the spec takes them from the caller.
  const float* scales() {
    if (!spec.given) return nullptr;
    std::vector<float> all;
    for (int64_t e = 0; e < groups.count; ++e) all.push_back(0.25f * static_cast<float>(e + 1));
    return twins_.array(all);
  }
  BufferCounts<int64_t> room(Direction d) const {
    return grouped_counts(spec, GroupSizes<int64_t>{x.rows, x.cols, groups.count}, d);
  }
  Side side(const BufferCounts<int64_t>& count) {
    return {twins_.room<std::byte>(count[0]), twins_.room<std::byte>(count[1] * scale_width()),
            twins_.room<float>(count[2])};
  }
  int64_t scale_width() const { return has_byte_scales(spec) ? 1 : 4; }
  void add(std::vector<Written>& written, const Side& side, const BufferCounts<int64_t>& count) const {
    written.push_back({"data", side.data, count[0]});
    written.push_back({"scale", side.scale, count[1] * scale_width()});
    written.push_back({"amax", side.amax, count[2] * 4});
  }

  static constexpr int64_t kCols = 48;
  QuantSpec spec;
  RowGroups groups;
  Matrix x;

 private:
  Twins& twins_;
  std::mt19937 dice_;
};

QuantizeProblem quantization(GroupsCase& c) {
  return {.spec = c.spec,
          .x = c.x,
          .rowwise = c.side(c.room(Direction::rowwise)),
          .columnwise = c.side(c.room(Direction::columnwise)),
          .random = {.seed = 5, .rowwise_offset = 7, .columnwise_offset = 9},
          .scale = c.scales(),
          .groups = c.groups,
          .room = {c.room(Direction::rowwise), c.room(Direction::columnwise)}};
}

TEST(Groups, AreQuantizedIntoFlatBuffersAsOnTheCpu) {
  int seed = 0;
  for (const auto& sizes : kSizes)
    for (const std::string& text : kSpecs) {
      SCOPED_TRACE(text + " of " + std::to_string(sizes.size()) + " groups");
      Twins twins;
      GroupsCase c(twins, sizes, text, ++seed);
      const QuantizeProblem p = quantization(c);
      std::vector<Written> written;
      c.add(written, p.rowwise, p.room.rowwise), c.add(written, p.columnwise, p.room.columnwise);
      twins.expect_same(p, written);
    }
}

TEST(Groups, WithoutRowsInOnlyAreLeftOut) {
  for (const char* text : {"mxfp8", "nvfp4:16x16"}) {
    Twins twins;
    GroupsCase c(twins, {16, 32, 16}, text, 4);
    QuantizeProblem p = quantization(c);
    p.only = {.count = 3, .rows = 9, .ends = {twins.array(std::vector<int32_t>{4, 4, 9}), 3}};
    std::vector<Written> written;
    c.add(written, p.rowwise, p.room.rowwise), c.add(written, p.columnwise, p.room.columnwise);
    twins.expect_same(p, written);
  }
}

TEST(Groups, OfAListHaveAMatrixEach) {
  for (const int64_t count : {3, 200}) {  // 200 do not fit into the parameters of one launch
    Twins twins;
    GroupsCase c(twins, std::vector<int64_t>(static_cast<size_t>(count), 4), "mxfp8", 6);
    c.groups = RowGroups::equal(count, 4);
    std::vector<Matrix> each;
    for (int64_t e = 0; e < count; ++e) each.push_back(c.matrix(4, GroupsCase::kCols, DType::bf16));
    c.x.rows = c.groups.rows, c.x.data = nullptr;
    QuantizeProblem p = quantization(c);
    p.each = each;
    std::vector<Written> written;
    c.add(written, p.rowwise, p.room.rowwise), c.add(written, p.columnwise, p.room.columnwise);
    twins.expect_same(p, written);
  }
}

TEST(Groups, OfAListMayHaveADtypeEach) {
  for (const char* text : {"mxfp8", "nvfp4:16x16", "fp8_tensor"}) {
    Twins twins;
    GroupsCase c(twins, {4, 4, 4}, text, 6);
    c.groups = RowGroups::equal(3, 4);
    std::vector<Matrix> each;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      each.push_back(c.matrix(4, GroupsCase::kCols, dtype));
    c.x.rows = c.groups.rows, c.x.data = nullptr;
    QuantizeProblem p = quantization(c);
    p.each = each;
    std::vector<Written> written;
    c.add(written, p.rowwise, p.room.rowwise), c.add(written, p.columnwise, p.room.columnwise);
    twins.expect_same(p, written);
  }
}

TEST(Groups, AreMeasuredAndTakeGivenAmaxes) {
  int seed = 0;
  for (const auto& sizes : kSizes)
    for (const char* text : {"fp8_tensor", "fp8_row", "nvfp4", "nvfp4:row_scaled", "nvfp4:rht"}) {
      SCOPED_TRACE(text);
      Twins twins;
      GroupsCase c(twins, sizes, text, ++seed);
      const GroupSizes<int64_t> all{c.x.rows, c.x.cols, c.groups.count};
      const int64_t rows = grouped_amax_count(c.spec, all, Direction::rowwise),
                    cols = grouped_amax_count(c.spec, all, Direction::columnwise);
      AmaxProblem p{.spec = c.spec,
                    .x = c.x,
                    .rowwise = twins.room<float>(rows),
                    .columnwise = twins.room<float>(cols),
                    .groups = c.groups};
      twins.expect_same(p, {{"rowwise", p.rowwise, rows * 4}, {"columnwise", p.columnwise, cols * 4}});
      for (int64_t i = 0; i < rows; ++i) p.rowwise[i] *= 2;
      QuantizeProblem q = quantization(c);
      q.amax = {p.rowwise, p.columnwise};
      std::vector<Written> written;
      c.add(written, q.rowwise, q.room.rowwise), c.add(written, q.columnwise, q.room.columnwise);
      twins.expect_same(q, written);
    }
}

TEST(Groups, AreDecodedFromFlatBuffers) {
  int seed = 0;
  for (const auto& sizes : kSizes)
    for (const std::string& text : kSpecs) {
      SCOPED_TRACE(text);
      Twins twins;
      GroupsCase c(twins, sizes, text, ++seed);
      const QuantizeProblem q = quantization(c);
      dispatch(q, host());
      DequantizeProblem p{.spec = c.spec,
                          .rows = c.x.rows,
                          .cols = c.x.cols,
                          .data = q.rowwise.data,
                          .scale = q.rowwise.scale,
                          .amax = q.rowwise.amax,
                          .out = {},
                          .groups = c.groups,
                          .room = q.room.rowwise};
      p.out = {twins.room<std::byte>(c.x.rows * 60 * 2), DType::bf16, c.x.rows, c.x.cols, 60};
      twins.expect_same(p, {{"out", p.out.data, c.x.rows * 60 * 2}});
    }
}

TEST(Groups, WhoseEndsDecreaseOrDoNotFitAreReported) {
  Twins twins;
  GroupsCase c(twins, {16, 32, 16}, "mxfp8", 6);
  for (const std::vector<int64_t>& ends : {std::vector<int64_t>{16, 8, 64}, {16, 32, 65}, {-1, 3, 4}}) {
    QuantizeProblem p = quantization(c);
    p.groups.ends = {twins.array(ends), 3, true};
    twins.expect_same_error(p);
  }
  for (int part = 0; part < 2; ++part) {
    QuantizeProblem p = quantization(c);
    p.room.rowwise[static_cast<size_t>(part)] -= 400;
    twins.expect_same_error(p);
  }
  // The device works on.
  const QuantizeProblem p = quantization(c);
  std::vector<Written> written;
  c.add(written, p.rowwise, p.room.rowwise);
  twins.expect_same(p, written);
}

TEST(Groups, WhoseGivenScaleOrAmaxIsNoneAreReported) {
  for (const float scale : {0.0f, -1.0f, NAN, INFINITY}) {
    Twins twins;
    GroupsCase c(twins, {16, 32}, "fp8_tensor:given", 6);
    QuantizeProblem p = quantization(c);
    p.scale = twins.array(std::vector<float>{1.0f, scale});
    twins.expect_same_error(p);
  }
  for (const float amax : {-1.0f, NAN}) {
    Twins twins;
    GroupsCase c(twins, {16}, "nvfp4", 6);
    c.groups = {.count = 1, .rows = 16}, c.x.rows = 16;
    QuantizeProblem p = quantization(c);
    p.amax.rowwise = twins.array(std::vector<float>{amax});
    twins.expect_same_error(p);
  }
}

TEST(FlatCounts, OfEverySpecAreThoseOfBuffers) {
  for (const std::string& text : whole_grammar())
    for (const Direction direction : {Direction::rowwise, Direction::columnwise})
      for (const int64_t cols : {1, 48, 129}) {
        const QuantSpec spec = QuantSpec::parse(text);
        const FlatCounts found = flat_counts(spec, cols, direction);
        for (const int64_t rows :
             {0, 1, 2, 4, 7, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 511, 512, 513, 2049}) {
          const auto expected = counts(buffers<int64_t>(spec, {rows, cols}, direction));
          for (size_t i = 0; i < found.size(); ++i)
            ASSERT_EQ(found[i](rows), expected[i])
                << text << ", buffer " << i << " of [" << rows << ", " << cols << "]";
        }
      }
}

}  // namespace
}  // namespace quire::testing
