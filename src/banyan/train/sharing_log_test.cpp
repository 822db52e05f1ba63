// The lines word for word (specification B6), and the rank fields of B7.
#include "banyan/train/sharing_log.h"

#include <gtest/gtest.h>

#include "banyan/testing/random_trie.h"

namespace banyan::train::sharing_log {
namespace {

using trie::PackedLayout;
using trie::SharingPlan;

SharingPlan plan_of(const std::vector<std::vector<int32_t>>& rows) {
  const std::vector<Sample> samples = testing::samples_from(rows);
  return trie::make_sharing_plan(
      samples, trie::make_detector("trie", {.min_prefix_len = 3})->detect(samples), 4, 2);
}

const SharingPlan kPlan = plan_of({{1, 2, 3, 10, 11}, {1, 2, 3, 20, 21}});
const PackedLayout kLayout =
    trie::make_packed_layout(kPlan.kept_lengths_q, 2, kPlan.q_position_offsets);
const trie::SharingStatistics kExpected = trie::sharing_statistics(kPlan, kLayout);

RankInfo tensor_rank() {
  RankInfo rank;
  rank.global_rank = 6;
  rank.tp_rank = 2;
  rank.tp_size = 4;
  rank.pp_rank = 1;
  rank.pp_size = 3;
  rank.sequence_parallel = true;
  return rank;
}

TEST(SharingLog, PythonsWayOfPrinting) {
  EXPECT_EQ(repr(true), "True");
  EXPECT_EQ(repr(std::vector<int32_t>{}), "[]");
  EXPECT_EQ(repr(std::vector<int32_t>{1, 2}), "[1, 2]");
  EXPECT_EQ(repr(std::vector<std::string>{"a", "b"}), "['a', 'b']");
  EXPECT_EQ(repr(std::vector<trie::Range>{{0, 7}, {3, 6}}), "[(0, 7), (3, 6)]");
  EXPECT_EQ(tuple({7, 2, 4}), "(7, 2, 4)");
  EXPECT_EQ(tuple({7}), "(7,)");
  EXPECT_EQ(torch_size({2, 5}), "torch.Size([2, 5])");
}

TEST(SharingLog, RankFieldsAndTheirDefaults) {
  const RankInfo none;
  EXPECT_EQ(rank_fields(none), "global_rank=unknown tp_rank=0/1");
  EXPECT_TRUE(none.is_pp_first());
  EXPECT_TRUE(none.is_pp_last());
  const RankInfo rank = tensor_rank();
  EXPECT_EQ(rank_fields(rank), "global_rank=6 tp_rank=2/4");
  EXPECT_FALSE(rank.is_pp_first());
  EXPECT_FALSE(rank.is_pp_last());
}

TEST(SharingLog, PrepareLines) {
  EXPECT_EQ(enter(2, {"input_ids", "responses"}),
            "[PS][prepare] ENTER: batch_size=2, batch_keys=['input_ids', 'responses']");
  EXPECT_EQ(disabled(),
            "[PS][prepare] PATH 1: prefix sharing disabled "
            "(config.enable_prefix_sharing=False), returning (batch, None)");
  EXPECT_EQ(enabled(), "[PS][prepare] config.enable_prefix_sharing=True, validating config...");
  const std::vector<std::string> checks = checks_passed(2, 5);
  ASSERT_EQ(checks.size(), 5u);
  EXPECT_EQ(checks[0], "[PS][prepare] config.validate() returned OK");
  EXPECT_EQ(checks[4],
            "[PS][prepare] tensor shapes: input_ids=torch.Size([2, 5]), "
            "attention_mask=torch.Size([2, 5]), position_ids=torch.Size([2, 5]) (logical)");
  EXPECT_EQ(sequences(kPlan.original_lengths),
            "[PS][prepare] sequences: num_seq=2, seq_lens=[5, 5]");
  EXPECT_EQ(plan_result(kPlan),
            "[PS][prepare] prefix_sharing_plan result: has_sharing=True, "
            "keep_ranges=[(0, 5), (3, 5)], prefix_last_restore=[PrefixLastRestoreSpec(reuse_idx=1, "
            "provider_idx=0, group_id=0, target_2d_pos=2, label_value=20)]");
  EXPECT_EQ(no_sharing("on"), "[PS][prepare] PATH 5: no sharing detected, returning (batch, None)");
  EXPECT_EQ(no_sharing("off"),
            "[PS][prepare] PATH 5: no sharing detected, returning (batch, None) decision=off");
  EXPECT_EQ(sharing_detected(),
            "[PS][prepare] PATH 6: sharing detected, preparing trimmed batch...");
  EXPECT_EQ(packed_layout(tensor_rank(), kLayout),
            "[PS][prepare][global_rank=6 tp_rank=2/4 cp_rank=0/1 pp_rank=1/3 is_pp_first=False "
            "is_pp_last=False] packed_batch_layout: valid_lengths=[5, 2], padded_lengths=[6, 2], "
            "cu_seqlens=[0, 6, 8], max_seqlen=6, total_valid=7, total_padded=8");
  EXPECT_EQ(prepared(kPlan),
            "[PS][prepare] PATH 6 DONE: returning (trimmed_micro_batch, "
            "prefix_sharing_runtime_state) with keep_ranges=[(0, 5), (3, 5)]");
}

TEST(SharingLog, AttentionLines) {
  AttentionCall call;
  call.layer = 7;
  call.query = {7, 4, 16};
  call.key = call.value = {7, 2, 16};
  call.valid_lengths = {5, 2};
  call.expanded_tokens = 10;
  const std::string where =
      "[PS][attention][global_rank=6 tp_rank=2/4(sequence_parallel=True) pp_rank=1/3 layer=7] ";
  EXPECT_EQ(attention(tensor_rank(), call, /*align_size=*/2),
            where +
                "enter prefix-sharing path: query_token_length=7 total_padded_length=8 "
                "query_shape=(7, 4, 16), key_shape=(7, 2, 16), value_shape=(7, 2, 16), "
                "valid_lengths=[5, 2], padded_lengths=[6, 2], cu_seqlens=[0, 6, 8]");
  EXPECT_EQ(expanded_kv(tensor_rank(), call),
            where +
                "built expanded kv: expanded_key_shape=(10, 2, 16), expanded_value_shape=(10, 2, "
                "16) (logical)");
  EXPECT_EQ(backend("native", call),
            "[PS][backend] native attention: layer=7, q_shape=(7, 4, 16), k_shape=(7, 2, 16), "
            "v_shape=(7, 2, 16)");
}

TEST(SharingLog, AuditSummary) {
  Measured measured;
  measured.kept_valid_tokens = 7;
  measured.kept_padded_tokens = 8;
  measured.actual_restore_count = 1;
  measured.unique_tokens = 7;
  measured.segments = 3;
  measured.forks = 1;
  measured.blocks = 1;
  measured.decision = "on";
  EXPECT_EQ(audit_summary(RankInfo{}, kExpected, measured),
            "[PS][audit][global_rank=unknown tp_rank=0/1] summary: forward_id=4 micro_batch_id=2 "
            "batch_size=2 original_tokens=10 kept_valid_tokens=7 kept_padded_tokens=8 "
            "reused_valid_tokens=3 reused_valid_token_ratio=0.3000 provider_count=1 reuser_count=1 "
            "sharing_group_count=1 expected_reused_counts_per_layer=1 "
            "expected_reused_prefix_tokens_per_layer=3 expected_restore_count=1 "
            "actual_restore_count=1 rho=1.4286 t0=10 t1=7 segments=3 forks=1 blocks=1 "
            "open_tokens=0 decision=on");
  EXPECT_EQ(runtime_missing(RankInfo{}, kExpected),
            "[PS][audit][global_rank=unknown tp_rank=0/1] runtime_missing: "
            "expected_reused_counts_per_layer=1 expected_reused_prefix_tokens_per_layer=3");
}

TEST(SharingLog, AuditOfALayer) {
  LayerRecord record;
  record.layer = 7;
  record.store_count = 2;
  record.reuse_count = record.reuse_hit_count = 1;
  record.stored_tokens = 7;
  record.reused_prefix_tokens = 3;
  record.expanded_kv_tokens = 10;
  record.valid_q_tokens = 7;
  record.padded_q_tokens = 8;
  const std::string start =
      "[PS][audit][global_rank=6 tp_rank=2/4 layer=7] runtime: store_count=2 reuse_count=1 "
      "reuse_hit_count=1 reuse_miss_count=0 stored_tokens=7 reused_prefix_tokens=3 "
      "expanded_kv_tokens=10 valid_q_tokens=7 padded_q_tokens=8 matches_expected=";
  EXPECT_EQ(audit_layer(tensor_rank(), record, kExpected),
            start + "True (expanded_kv_tokens logical)");
  record.recomputed_q_tokens = 7;
  EXPECT_EQ(audit_layer(tensor_rank(), record, kExpected),
            start + "True (expanded_kv_tokens logical) recomputed_q_tokens=7");
  record.forward_seconds = 0.0015;
  EXPECT_EQ(profile_layer(RankInfo{}, record),
            "[PS][profile][global_rank=unknown tp_rank=0/1 layer=7] attention: forward_ms=1.500 "
            "backward_ms=0.000");
}

TEST(SharingLog, ALayerMatchesOnlyWithoutMissAndWithTheExpectedReuse) {
  LayerRecord record;
  record.reuse_count = record.reuse_hit_count = 1;
  record.reused_prefix_tokens = 3;
  EXPECT_TRUE(record.matches(kExpected));
  record.reuse_miss_count = 1;
  EXPECT_FALSE(record.matches(kExpected));
  record.reuse_miss_count = 0;
  record.reused_prefix_tokens = 2;
  EXPECT_FALSE(record.matches(kExpected));
  record.reused_prefix_tokens = 3;
  record.reuse_count = 2;
  EXPECT_FALSE(record.matches(kExpected));
}

TEST(SharingLog, OtherLines) {
  EXPECT_EQ(restored(2, 5, 1),
            "[PS][restore_verl080] unfolded B=2 L_max=5, restored reusers=1 (prefix-last entries; "
            "interior handled by bulk slice) (logical)");
  EXPECT_EQ(trimming(10, 7, {3, 3}, {3, 0}, {2, 2}),
            "[PS][nopadding] trimming detected: expected_total=10 actual_total=7 "
            "original_prompt_lens=[3, 3] trimmed_prompt_lens=[3, 0] response_lens=[2, 2]");
  EXPECT_EQ(forward_step(tensor_rank(), "enter", {{"pass", "update"}}),
            "[PS][forward_step][global_rank=6 tp_rank=2/4 pp_rank=1/3 cp_rank=0/1] enter "
            "pass=update");
}

TEST(SharingLog, Levels) {
  EXPECT_EQ(observe_level(""), ObserveLevel::kOff);
  EXPECT_LT(observe_level("summary"), observe_level("layer"));
  EXPECT_LT(observe_level("layer"), observe_level("profile"));
  EXPECT_LT(observe_level("profile"), observe_level("debug"));
  EXPECT_THROW(observe_level("all"), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::train::sharing_log
