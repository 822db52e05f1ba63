// The provider/reuser plan on the specification's numbers (B7: planner, trim, block mask), and the
// view against the trie that is executed.
#include "banyan/trie/sharing_view.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "banyan/testing/random_trie.h"

namespace banyan::trie {
namespace {

using Ints = std::vector<int32_t>;
using testing::samples_from;
using Rows = std::vector<Ints>;

SharingPlan plan_of(const Rows& rows, int32_t min_prefix_len) {
  const std::vector<Sample> samples = samples_from(rows);
  return make_sharing_plan(
      samples,
      make_detector("trie", {.min_prefix_len = min_prefix_len})->detect(samples),
      /*forward_id=*/1,
      /*micro_batch_id=*/1);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(SharingView, PlanVectors) {
  const SharingPlan plan = plan_of(
      {{1, 2, 3, 4, 5, 10, 11}, {1, 2, 3, 20, 21, 22}, {1, 2, 3, 4, 5, 30, 31}, {9, 9, 9}}, 3);
  EXPECT_TRUE(plan.has_sharing());
  EXPECT_EQ(plan.original_lengths, (Ints{7, 6, 7, 3}));
  EXPECT_EQ(plan.suffix_lens, (Ints{7, 3, 2, 3}));
  EXPECT_EQ(plan.kept_lengths_q, plan.suffix_lens);
  EXPECT_EQ(plan.expanded_lengths_kv, (Ints{7, 6, 7, 3}));
  const std::vector<Range> ranges = {{0, 7}, {3, 6}, {5, 7}, {0, 3}};
  EXPECT_EQ(plan.input_keep_ranges, ranges);
  EXPECT_EQ(plan.label_keep_ranges, ranges);
  EXPECT_EQ(plan.loss_mask_keep_ranges, ranges);
  EXPECT_EQ(plan.cu_seqlens_q, (Ints{0, 7, 10, 12, 15}));
  EXPECT_EQ(plan.cu_seqlens_kv, (Ints{0, 7, 13, 20, 23}));
  EXPECT_EQ(plan.max_seqlen_q, 7);
  EXPECT_EQ(plan.max_seqlen_kv, 7);
  EXPECT_EQ(plan.q_position_offsets, (Ints{0, 3, 5, 0}));
  EXPECT_EQ(plan.kv_position_offsets, (Ints{0, 0, 0, 0}));
  EXPECT_EQ(plan.prefix_last_restore,
            (std::vector<PrefixLastRestore>{{1, 0, 0, 2, 20}, {2, 0, 1, 4, 30}}));
  EXPECT_FALSE(plan.is_reuser(0));
  EXPECT_TRUE(plan.is_reuser(2));
  EXPECT_EQ(plan.q_range_for_batch(1), (Range{7, 10}));
  EXPECT_EQ(plan.kv_range_for_batch(2), (Range{13, 20}));
  EXPECT_EQ(plan.restore_for_reuse(3), nullptr);
  ASSERT_NE(plan.restore_for_reuse(2), nullptr);
  EXPECT_EQ(plan.restore_for_reuse(2)->label_value, 30);
}

TEST(SharingView, NothingShared) {
  const SharingPlan plan = plan_of({{1, 2}, {1, 3}, {4, 5}}, 2);
  EXPECT_FALSE(plan.has_sharing());
  EXPECT_EQ(plan.group_ids, (Ints{-1, -1, -1}));
  EXPECT_EQ(plan.input_keep_ranges, (std::vector<Range>{{0, 2}, {0, 2}, {0, 2}}));
  EXPECT_TRUE(plan.prefix_last_restore.empty());
}

TEST(SharingView, OneRestoreForTwoRows) {
  const SharingPlan plan = plan_of({{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 7, 8}}, 3);
  EXPECT_EQ(plan.prefix_last_restore, (std::vector<PrefixLastRestore>{{1, 0, 0, 3, 7}}));
  EXPECT_EQ(plan.kept_lengths_q, (Ints{6, 2}));
}

// The chain of the specification's context case: each row's restore comes from its direct provider.
TEST(SharingView, AChainRestoresFromTheDirectProvider) {
  const SharingPlan plan = plan_of({{1, 2, 3, 4, 5}, {1, 2, 3, 7, 8}, {1, 2, 3, 7, 9}}, 1);
  EXPECT_EQ(plan.provider_index, (Ints{0, 0, 1}));
  EXPECT_EQ(plan.prefix_lens, (Ints{0, 3, 4}));
  ASSERT_EQ(plan.prefix_last_restore.size(), 2u);
  EXPECT_EQ(plan.prefix_last_restore[0], (PrefixLastRestore{1, 0, 0, 2, 7}));
  EXPECT_EQ(plan.prefix_last_restore[1], (PrefixLastRestore{2, 1, 1, 3, 9}));
}

TEST(SharingView, ARowWithoutSuffixHasNoRestoreEntry) {
  const SharingPlan plan = plan_of({{1, 2, 3}, {1, 2, 3}}, 1);
  EXPECT_EQ(plan.kept_lengths_q, (Ints{3, 0}));
  EXPECT_TRUE(plan.has_sharing());
  EXPECT_TRUE(plan.prefix_last_restore.empty());
}

TEST(SharingView, ContradictingDetectionsAreRefused) {
  const std::vector<Sample> samples = samples_from({{1, 2, 3}, {1, 2, 4}});
  const Detection good = make_detector("trie", {})->detect(samples);
  const auto message = [&](const Detection& detection) {
    return error_of([&] { make_sharing_plan(samples, detection, 1, 1); });
  };
  EXPECT_EQ(message(good), "");
  Detection bad = good;
  bad.batch_size = 3;
  EXPECT_NE(message(bad).find("batch size"), std::string::npos);
  bad = good;
  bad.prefix_lens.push_back(0);
  EXPECT_NE(message(bad).find("prefix_lens: wanted one per row"), std::string::npos);
  bad = good;
  bad.is_provider.pop_back();
  EXPECT_NE(message(bad).find("is_provider"), std::string::npos);
  bad = good;
  bad.prefix_lens[1] = 4;
  EXPECT_NE(message(bad).find("prefix_len of row 1"), std::string::npos);
  bad.prefix_lens[1] = -1;
  EXPECT_NE(message(bad).find("got -1"), std::string::npos);
}

TEST(SharingView, TrimKeepsTheSuffixes) {
  const Rows rows = {{1, 2, 3, 10, 11}, {1, 2, 3, 20, 21, 22}};
  const SharingPlan plan = plan_of(rows, 3);
  const Trimmed<int32_t> inputs = trim(rows, plan.input_keep_ranges);
  EXPECT_EQ(inputs.rows, (Rows{{1, 2, 3, 10, 11}, {20, 21, 22}}));
  EXPECT_EQ(inputs.flat, (Ints{1, 2, 3, 10, 11, 20, 21, 22}));
  EXPECT_EQ(inputs.cu_seqlens, (Ints{0, 5, 8}));
  const std::vector<std::vector<uint8_t>> masks = {{0, 0, 0, 1, 1}, {0, 0, 0, 1, 1, 1}};
  EXPECT_EQ(trim(masks, plan.loss_mask_keep_ranges).rows[1], (std::vector<uint8_t>{1, 1, 1}));
}

// Two prompts: the group that shares is trimmed, the lone row is left as it is.
TEST(SharingView, TrimLeavesOtherRowsUntouched) {
  const Rows rows = {{101, 102, 103, 201}, {101, 102, 103, 301, 302, 303}, {901, 902}};
  const Trimmed<int32_t> kept = trim(rows, plan_of(rows, 3).input_keep_ranges);
  EXPECT_EQ(kept.rows[1], (Ints{301, 302, 303}));
  EXPECT_EQ(kept.rows[2], (Ints{901, 902}));
}

TEST(SharingView, TrimChecksItsRanges) {
  const Rows rows = {{1, 2, 3}};
  EXPECT_NE(error_of([&] { trim(rows, {}); }).find("one per row, 1, got 0"), std::string::npos);
  EXPECT_NE(error_of([&] { trim(rows, {{1, 4}}); }).find("got (1, 4)"), std::string::npos);
  EXPECT_NE(error_of([&] { trim(rows, {{2, 1}}); }), "");
  EXPECT_NE(error_of([&] { trim(rows, {{-1, 2}}); }), "");
}

TEST(SharingView, BlockMaskOfALoneRowIsALowerTriangle) {
  const SharingPlan plan = plan_of({{1, 2, 3}, {4, 5}}, 1);
  EXPECT_EQ(block_mask(plan), (std::vector<uint8_t>{0, 1, 1, 1, 1,  //
                                                    0, 0, 1, 1, 1,  //
                                                    0, 0, 0, 1, 1,  //
                                                    1, 1, 1, 0, 1,  //
                                                    1, 1, 1, 0, 0}));
}

// Prefix 3, suffix 2: the first query of the reuser sees its four keys.
TEST(SharingView, BlockMaskOfAReuserStartsBehindItsPrefix) {
  const SharingPlan plan = plan_of({{1, 2, 3, 8}, {1, 2, 3, 5, 6}}, 1);
  const std::vector<uint8_t> mask = block_mask(plan);
  const int64_t columns = 9;
  const auto row = [&](int64_t q) {
    return std::vector<uint8_t>(mask.begin() + q * columns + 4, mask.begin() + (q + 1) * columns);
  };
  EXPECT_EQ(row(4), (std::vector<uint8_t>{0, 0, 0, 0, 1}));
  EXPECT_EQ(row(5), (std::vector<uint8_t>{0, 0, 0, 0, 0}));
  for (int64_t key = 0; key < 4; ++key) EXPECT_EQ(mask[4 * columns + key], 1);
}

// What the older design sees through expanded keys is what the trie sees in place: visible(q, k) of
// A4 and the block mask agree on every pair.
TEST(SharingView, BlockMaskIsTheVisibilityOfTheTrie) {
  for (const testing::TrieCase& named : testing::trie_cases(3, 64)) {
    const Trie trie = build(named.samples);
    const SharingPlan plan =
        make_sharing_plan(named.samples, make_detector("trie", {})->detect(named.samples), 1, 1);
    const std::vector<uint8_t> mask = block_mask(plan);
    const int64_t columns = plan.cu_seqlens_kv.back();
    ASSERT_EQ(plan.cu_seqlens_q.back(), trie.num_tokens()) << named.name;
    for (int32_t row = 0; row < plan.batch_size; ++row) {
      const Ints path = trie.path(row);
      const Range kept = plan.input_keep_ranges[row];
      for (int32_t p = kept.begin; p < kept.end; ++p) {
        const int64_t query = plan.cu_seqlens_q[row] + p - kept.begin;
        for (int32_t j = 0; j < static_cast<int32_t>(path.size()); ++j) {
          const bool visible = path[j] <= path[p] && path[p] < trie.tout[path[j]];
          EXPECT_EQ(mask[query * columns + plan.cu_seqlens_kv[row] + j] == 0, visible);
        }
      }
    }
  }
}

}  // namespace
}  // namespace banyan::trie
