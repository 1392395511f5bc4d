// Shapes of what is stored, and the index maps into it: every code and every scale has a place of its own.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "quire/spec/buffers.h"
#include "quire/spec/scale_index.h"
#include "specs.h"

namespace quire::testing {
namespace {

using Sizes = Shape<int64_t>;
constexpr Direction kRow = Direction::rowwise, kCol = Direction::columnwise;

struct Expected {
  std::string_view spec;
  Direction direction;
  Sizes data, scale, amax;
};

TEST(Buffers, ShapesAreThoseOfTheContract) {
  // A tensor of [3, 50, 70]: M = 150, K = 70.
  const Expected table[] = {
      {"fp8_tensor", kRow, {3, 50, 70}, {1}, {1}},
      {"fp8_tensor", kCol, {70, 150}, {1}, {1}},
      {"fp8_row:e5m2", kRow, {3, 50, 70}, {150}, {0}},
      {"fp8_row", kCol, {70, 150}, {70}, {0}},
      {"fp8_block", kRow, {3, 50, 70}, {1, 150}, {0}},
      {"fp8_block", kCol, {70, 150}, {2, 70}, {0}},
      {"fp8_block:128x128", kRow, {3, 50, 70}, {2, 1}, {0}},
      {"fp8_block:128x128", kCol, {70, 150}, {1, 2}, {0}},
      {"mxfp8", kRow, {3, 50, 70}, {150, 3}, {0}},
      {"mxfp8", kCol, {3, 50, 70}, {5, 70}, {0}},
      {"mxfp8:swizzled", kRow, {3, 50, 70}, {256, 4}, {0}},
      {"mxfp8:swizzled", kCol, {3, 50, 70}, {8, 128}, {0}},
      {"mxfp8:32x32", kRow, {3, 50, 70}, {150, 3}, {0}},
      {"mxfp4", kRow, {3, 50, 35}, {150, 3}, {0}},
      {"mxfp4", kCol, {70, 75}, {70, 5}, {0}},
      {"nvfp4", kRow, {3, 50, 35}, {150, 5}, {1}},
      {"nvfp4", kCol, {70, 75}, {70, 10}, {1}},
      {"nvfp4:swizzled", kCol, {70, 75}, {128, 12}, {1}},
      {"nvfp4:16x16", kCol, {70, 75}, {70, 10}, {1}},
      {"nvfp4:rht", kRow, {3, 50, 35}, {150, 5}, {1}},
      {"nvfp4:rht", kCol, {70, 80}, {70, 10}, {1}},
      {"fp8_row:interleaved", kRow, {160, 72}, {150}, {0}},
      {"fp8_block:interleaved", kCol, {80, 152}, {2, 70}, {0}},
      {"mxfp8:interleaved", kRow, {160, 72}, {160, 4}, {0}},
      {"mxfp8:interleaved", kCol, {80, 152}, {80, 8}, {0}},
      {"nvfp4:interleaved", kRow, {160, 36}, {160, 8}, {1}},
      {"nvfp4:rht:interleaved", kCol, {80, 80}, {80, 12}, {1}},
      {"nvfp4:row_scaled", kRow, {3, 50, 35}, {150, 5}, {150}},
      {"nvfp4:row_scaled", kCol, {70, 75}, {70, 10}, {70}},
  };
  for (const Expected& e : table) {
    SCOPED_TRACE(text(e.spec, e.direction == kRow ? " rowwise" : " columnwise"));
    const QuantSpec spec = QuantSpec::parse(e.spec);
    const Buffers<int64_t> b = buffers<int64_t>(spec, {3, 50, 70}, e.direction);
    EXPECT_EQ(b.data.sizes, e.data);
    EXPECT_EQ(b.scale.sizes, e.scale);
    EXPECT_EQ(b.amax.sizes, e.amax);
    EXPECT_EQ(b.data.dtype, DType::u8);
    EXPECT_EQ(b.scale.dtype, spec.row().scale == ScaleKind::f32 ? DType::f32 : DType::u8);
    EXPECT_EQ(b.amax.dtype, DType::f32);
  }
}

TEST(Buffers, OddSizesRoundUpAndEmptyOnesStayEmpty) {
  const auto shape = [](std::string_view spec, const Sizes& sizes, Direction d) {
    const Buffers<int64_t> b = buffers<int64_t>(QuantSpec::parse(spec), sizes, d);
    return std::vector<Sizes>{b.data.sizes, b.scale.sizes, b.amax.sizes};
  };
  EXPECT_EQ(shape("nvfp4", {5}, kRow), (std::vector<Sizes>{{3}, {1, 1}, {1}}));
  EXPECT_EQ(shape("nvfp4:rht", {1, 5}, kCol), (std::vector<Sizes>{{5, 8}, {5, 1}, {1}}));
  EXPECT_EQ(shape("nvfp4:rht", {0, 5}, kCol), (std::vector<Sizes>{{5, 0}, {5, 0}, {1}}));
  EXPECT_EQ(shape("mxfp8:swizzled", {0, 5}, kRow), (std::vector<Sizes>{{0, 5}, {0, 4}, {0}}));
  EXPECT_EQ(shape("fp8_tensor", {0, 0}, kCol), (std::vector<Sizes>{{0, 0}, {1}, {1}}));
}

/// Lines that share the scale of line o.
int64_t scale_line(const QuantSpec& spec, int64_t o) {
  const FamilyRow& row = spec.row();
  if (row.scope == Scope::tensor) return 0;
  return spec.square && row.scale == ScaleKind::f32 ? o / row.block : o;
}

TEST(Buffers, IndexMapsGiveEveryCodeAndEveryScaleItsOwnPlaceInside) {
  for (const QuantSpec& spec : all_specs())
    for (const Sizes& shape : {Sizes{1, 1}, Sizes{33, 47}, Sizes{150, 70}, Sizes{257, 130}})
      for (const Direction d : {kRow, kCol}) {
        SCOPED_TRACE(spec.to_string());
        const int64_t outer = d == kRow ? shape[0] : shape[1];
        const int64_t contraction = d == kRow ? shape[1] : columnwise_tokens(spec, shape[0]);
        const Buffers<int64_t> b = buffers<int64_t>(spec, shape, d);
        const int64_t codes = product(b.data.sizes, 0, b.data.sizes.size()) * (spec.packed() ? 2 : 1);
        const int64_t scales = product(b.scale.sizes, 0, b.scale.sizes.size());
        std::vector<bool> code_seen(static_cast<size_t>(codes));
        std::vector<int64_t> scale_owner(static_cast<size_t>(scales), -1);
        const int64_t blocks = block_count(spec, contraction), length = block_length(spec, contraction);
        for (int64_t o = 0; o < outer; ++o)
          for (int64_t l = 0; l < contraction; ++l) {
            const int64_t i = data_index({spec, d, outer, contraction}, o, l);
            ASSERT_TRUE(i >= 0 && i < codes && !code_seen[static_cast<size_t>(i)]);
            code_seen[static_cast<size_t>(i)] = true;
            const int64_t s = scale_index({spec, d, outer, blocks}, o, l / length);
            ASSERT_TRUE(s >= 0 && s < scales);
            const int64_t owner = scale_line(spec, o) * blocks + l / length;
            int64_t& seen = scale_owner[static_cast<size_t>(s)];
            ASSERT_TRUE(seen == -1 || seen == owner);
            seen = owner;
          }
        const std::set<int64_t> owners(scale_owner.begin(), scale_owner.end());
        EXPECT_EQ(static_cast<int64_t>(owners.size() - owners.count(-1)), (scale_line(spec, outer - 1) + 1) * blocks);
      }
}

TEST(Buffers, CompactScalesAreRowMajorInTheirShape) {
  const QuantSpec block = QuantSpec::parse("fp8_block"), square = QuantSpec::parse("fp8_block:128x128");
  EXPECT_EQ(scale_index({block, kRow, 150, 3}, 7, 2), 2 * 150 + 7);
  EXPECT_EQ(scale_index({square, kRow, 300, 3}, 257, 1), 2 * 3 + 1);
  EXPECT_EQ(scale_index({QuantSpec::parse("mxfp8"), kRow, 150, 3}, 7, 2), 7 * 3 + 2);
  EXPECT_EQ(scale_index({QuantSpec::parse("mxfp8"), kCol, 70, 5}, 7, 2), 2 * 70 + 7);
  EXPECT_EQ(scale_index({QuantSpec::parse("nvfp4"), kCol, 70, 5}, 7, 2), 7 * 5 + 2);
  EXPECT_EQ(scale_index({QuantSpec::parse("mxfp8:swizzled"), kCol, 256, 8}, 33, 5), 533);
}

}  // namespace
}  // namespace quire::testing
