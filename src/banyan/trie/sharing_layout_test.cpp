// Layouts and statistics on the specification's numbers (B7: layout, statistics, micro-batch, flash
// base), with every way to get a layout wrong.
#include "banyan/trie/sharing_layout.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "banyan/testing/random_trie.h"

namespace banyan::trie {
namespace {

using testing::samples_from;
using Ints = std::vector<int32_t>;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

SharingPlan two_rows(const Ints& first, const Ints& second) {
  const std::vector<Sample> rows = samples_from({first, second});
  return make_sharing_plan(rows, make_detector("trie", {.min_prefix_len = 3})->detect(rows), 1, 1);
}

// Lengths 5 and 5 with three shared tokens: 5 and 2 remain.
const SharingPlan kFiveAndTwo = two_rows({1, 2, 3, 10, 11}, {1, 2, 3, 20, 21});

struct Aligned {
  int32_t tp;
  Ints padded;
  Ints cu;
  Ints positions;
  int32_t first_of_second;
};

TEST(SharingLayout, FiveAndTwoAtEveryAlignment) {
  const std::vector<Aligned> cases = {
      {1, {5, 2}, {0, 5, 7}, {0, 1, 2, 3, 4, 3, 4}, 5},
      {2, {6, 2}, {0, 6, 8}, {0, 1, 2, 3, 4, 0, 3, 4}, 6},
      {4, {8, 4}, {0, 8, 12}, {0, 1, 2, 3, 4, 0, 0, 0, 3, 4, 0, 0}, 8},
      {8, {8, 8}, {0, 8, 16}, {0, 1, 2, 3, 4, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0}, 8}};
  for (const Aligned& want : cases) {
    const PackedLayout layout = make_packed_layout(kFiveAndTwo.kept_lengths_q,
                                                   layout_alignment(want.tp, /*cp_size=*/1),
                                                   kFiveAndTwo.q_position_offsets);
    EXPECT_EQ(layout.valid_lengths, (Ints{5, 2}));
    EXPECT_EQ(layout.padded_lengths, want.padded);
    EXPECT_EQ(layout.cu_seqlens, want.cu);
    EXPECT_EQ(layout.packed_position_ids, want.positions);
    EXPECT_EQ(layout.packed_index(1, 0), want.first_of_second);
    EXPECT_EQ(layout.total_valid(), 7);
    EXPECT_EQ(layout.total_padded(), want.cu.back());
    EXPECT_EQ(layout.max_seqlen, want.padded[0]);
    EXPECT_EQ(layout.has_pads(), want.tp > 1);
    for (int32_t slot = 0; slot < layout.total_padded(); ++slot) {
      const bool in_first = slot < 5;
      const bool in_second = slot >= want.first_of_second && slot < want.first_of_second + 2;
      EXPECT_EQ(layout.valid_token_mask[slot] == 1, in_first || in_second) << slot;
    }
    check_packed_layout(layout);
  }
}

TEST(SharingLayout, ContextParallelismAlignsToTwoPiecesPerRank) {
  EXPECT_EQ(layout_alignment(4, 1), 4);
  EXPECT_EQ(layout_alignment(2, 3), 12);
  EXPECT_NE(error_of([] { layout_alignment(0, 1); }), "");
  EXPECT_NE(error_of([] { layout_alignment(1, 0); }), "");
}

TEST(SharingLayout, AnIndexOnAPadIsOutOfRange) {
  const PackedLayout layout = make_packed_layout({3}, 2);
  EXPECT_EQ(layout.packed_index(0, 2), 2);
  EXPECT_THROW(layout.packed_index(0, 3), std::out_of_range);
  EXPECT_THROW(layout.packed_index(0, -1), std::out_of_range);
  EXPECT_THROW(layout.packed_index(1, 0), std::out_of_range);
}

TEST(SharingLayout, EmptyBatchAndEmptyRow) {
  const PackedLayout none = make_packed_layout({}, 4);
  EXPECT_EQ(none.cu_seqlens, (Ints{0}));
  EXPECT_EQ(none.total_padded(), 0);
  EXPECT_EQ(none.max_seqlen, 0);
  const PackedLayout gap = make_packed_layout({3, 0, 1}, 2);
  EXPECT_EQ(gap.padded_lengths, (Ints{4, 0, 2}));
  EXPECT_EQ(gap.valid_slice(1), (Range{4, 4}));
  EXPECT_EQ(gap.valid_slice(2), (Range{4, 5}));
  EXPECT_EQ(gap.padded_slice(2), (Range{4, 6}));
  EXPECT_THROW(gap.packed_index(1, 0), std::out_of_range);
}

TEST(SharingLayout, BadArgumentsAreRefused) {
  EXPECT_NE(error_of([] { make_packed_layout({1}, 0); }).find("align_size: wanted >= 1, got 0"),
            std::string::npos);
  EXPECT_NE(error_of([] { make_packed_layout({1, -1}, 1); }).find("valid length of row 1"),
            std::string::npos);
  EXPECT_NE(error_of([] { make_packed_layout({1, 2}, 1, {0}); }).find("position_offsets"),
            std::string::npos);
}

TEST(SharingLayout, InconsistentVectorsAreNamed) {
  const PackedLayout good = make_packed_layout({5, 2}, 2);
  const auto message = [&](const std::function<void(PackedLayout&)>& damage) {
    PackedLayout layout = good;
    damage(layout);
    return error_of([&] { check_packed_layout(layout); });
  };
  EXPECT_EQ(message([](PackedLayout&) {}), "");
  const std::vector<std::pair<std::function<void(PackedLayout&)>, const char*>> cases = {
      {[](PackedLayout& l) { l.align_size = 0; }, "align_size"},
      {[](PackedLayout& l) { l.valid_lengths.push_back(1); }, "padded_lengths"},
      {[](PackedLayout& l) { l.valid_lengths[1] = -1; }, "valid_lengths"},
      {[](PackedLayout& l) { l.valid_lengths[0] = 7; }, "padded_lengths"},
      {[](PackedLayout& l) { l.padded_lengths[0] = 7; }, "padded_lengths"},
      {[](PackedLayout& l) { l.cu_seqlens.pop_back(); }, "cu_seqlens"},
      {[](PackedLayout& l) { l.cu_seqlens[0] = 1; }, "cu_seqlens"},
      {[](PackedLayout& l) { l.cu_seqlens[1] = 5; }, "cu_seqlens"},
      {[](PackedLayout& l) { l.max_seqlen = 5; }, "max_seqlen"},
      {[](PackedLayout& l) { l.packed_position_ids.pop_back(); }, "packed_position_ids"},
      {[](PackedLayout& l) { l.valid_token_mask.push_back(0); }, "valid_token_mask"},
      {[](PackedLayout& l) { l.valid_token_mask[0] = 0; }, "valid_token_mask"},
  };
  for (const auto& [damage, name] : cases) {
    EXPECT_NE(message(damage).find(name), std::string::npos) << name;
  }
}

TEST(SharingLayout, UnpadAndRepadAreInverse) {
  const PackedLayout layout = make_packed_layout({5, 3}, 4);
  ASSERT_EQ(layout.total_padded(), 12);
  Ints tokens(8), matrix(8 * 6);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i) + 1;
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<int32_t>(i) + 1;
  EXPECT_EQ(repad(tokens, layout), (Ints{1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 0}));
  EXPECT_EQ(unpad(repad(tokens, layout), layout), tokens);
  const Ints wide = repad(matrix, layout, /*width=*/6, /*fill=*/-1);
  EXPECT_EQ(wide.size(), 12u * 6u);
  EXPECT_EQ(wide[5 * 6], -1);
  EXPECT_EQ(wide[8 * 6], matrix[5 * 6]);
  EXPECT_EQ(unpad(wide, layout, 6), matrix);
  EXPECT_NE(error_of([&] { unpad(tokens, layout); }).find("wanted the padded total, 12, got 8"),
            std::string::npos);
  EXPECT_NE(error_of([&] { repad(Ints{1}, layout); }).find("wanted the valid total, 8, got 1"),
            std::string::npos);
}

TEST(SharingLayout, WithoutPadsNothingMoves) {
  const PackedLayout layout = make_packed_layout({2, 4}, 2);
  const Ints tokens = {1, 2, 3, 4, 5, 6};
  EXPECT_FALSE(layout.has_pads());
  EXPECT_EQ(unpad(tokens, layout), tokens);
  EXPECT_EQ(repad(tokens, layout), tokens);
}

// provider_1d_pos of the specification's context cases.
TEST(SharingLayout, ARestoreReadsTheProvidersLastSharedToken) {
  const SharingPlan plan = two_rows({1, 2, 3, 10, 11}, {1, 2, 3, 20, 21, 22});
  ASSERT_EQ(plan.prefix_last_restore.size(), 1u);
  const PrefixLastRestore& restore = plan.prefix_last_restore[0];
  EXPECT_EQ(restore.target_2d_pos, 2);
  EXPECT_EQ(restore.label_value, 20);
  EXPECT_EQ(plan.cu_seqlens_kv.back(), 11);
  const PackedLayout dense = make_packed_layout(plan.kept_lengths_q, 1);
  EXPECT_EQ(dense.total_valid(), 8);
  EXPECT_EQ(provider_slot(plan, dense, restore), 2);

  const std::vector<Sample> rows =
      samples_from({{1, 2, 3, 4, 5}, {1, 2, 3, 7, 8}, {1, 2, 3, 7, 9}});
  const SharingPlan chain = make_sharing_plan(rows, make_detector("trie", {})->detect(rows), 1, 1);
  const PackedLayout packed = make_packed_layout(chain.kept_lengths_q, 2);
  EXPECT_EQ(packed.cu_seqlens, (Ints{0, 6, 8, 10}));
  EXPECT_EQ(provider_slot(chain, packed, chain.prefix_last_restore[0]), 2);
  EXPECT_EQ(provider_slot(chain, packed, chain.prefix_last_restore[1]), 6);  // row 1's own token
}

TEST(SharingLayout, TheKeptPartOfARowAsAMask) {
  const Range kept = kFiveAndTwo.input_keep_ranges[1];
  std::vector<bool> mask(5, false);
  for (int32_t i = kept.begin; i < kept.end; ++i) mask[i] = true;
  EXPECT_EQ(mask, (std::vector<bool>{false, false, false, true, true}));
}

TEST(SharingLayout, StatisticsOfFiveAndTwo) {
  const PackedLayout layout =
      make_packed_layout(kFiveAndTwo.kept_lengths_q, 2, kFiveAndTwo.q_position_offsets);
  const SharingStatistics out = sharing_statistics(kFiveAndTwo, layout);
  EXPECT_EQ(out.batch_size, 2);
  EXPECT_EQ(out.original_tokens, 10);
  EXPECT_EQ(out.kept_valid_tokens, 7);
  EXPECT_EQ(out.kept_padded_tokens, 8);
  EXPECT_EQ(out.reused_valid_tokens, 3);
  EXPECT_DOUBLE_EQ(out.reused_valid_token_ratio, 0.3);
  EXPECT_EQ(out.provider_count, 1);
  EXPECT_EQ(out.reuser_count, 1);
  EXPECT_EQ(out.sharing_group_count, 1);
  EXPECT_EQ(out.expected_reused_counts_per_layer, 1);
  EXPECT_EQ(out.expected_reused_prefix_tokens_per_layer, 3);
  EXPECT_EQ(out.expected_restore_count, 1);
  EXPECT_NE(error_of([] { sharing_statistics(kFiveAndTwo, make_packed_layout({5, 3}, 1)); }), "");
}

}  // namespace
}  // namespace banyan::trie
