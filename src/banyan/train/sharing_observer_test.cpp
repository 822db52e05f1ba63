// The observer counts what attention is really given: plans carried out by a stand-in for the
// model, faithfully and not.
#include "banyan/train/sharing_observer.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "banyan/testing/random_trie.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/walk.h"

namespace banyan::train {
namespace {

using Lines = std::vector<std::string>;

class NoAttention final : public AttentionContext {
 public:
  at::Tensor forward(int64_t,
                     const at::Tensor& q,
                     const at::Tensor&,
                     const at::Tensor&,
                     double,
                     at::Tensor*) override {
    return q;
  }
  AttentionGradients backward(int64_t,
                              const at::Tensor& grad_out,
                              const at::Tensor&,
                              const at::Tensor& k,
                              const at::Tensor& v,
                              const at::Tensor&,
                              const at::Tensor&,
                              double) override {
    return {grad_out, k, v};
  }
};

SharingConfig config_of(const std::string& observe, const std::string& detector = "trie") {
  SharingConfig config;
  config.mode = "on";
  config.min_prefix_len = 1;
  config.min_group_size = 2;
  config.detector = detector;
  config.observe = observe;
  return config;
}

// A pass of two layers that runs the given blocks in order.
struct Passage {
  Passage(const SharingConfig& config, const std::vector<Sample>& given)
      : samples(given),
        observer(config, RankInfo{.global_rank = 0}, [this](const std::string& line) {
          said.push_back(line);
        }) {}

  void prepare(const trie::Plan& plan, const std::string& name = "update") {
    prepare_pass(&observer, {.name = name, .batch_keys = {"input_ids"}}, samples, plan);
  }
  void run(const trie::Plan& plan, int32_t block, bool recompute = false, int64_t extra = 0) {
    const auto context = observer.watch(block, recompute, std::make_unique<NoAttention>());
    const int64_t tokens = plan.blocks[block].num_own() + extra;
    const at::Tensor q = at::zeros({tokens, 4, 2});
    const at::Tensor k = at::zeros({tokens, 2, 2});
    for (int64_t layer = 0; layer < 2; ++layer) context->forward(layer, q, k, k, 1.0, nullptr);
    for (int64_t layer = 1; layer >= 0; --layer) context->backward(layer, q, q, k, k, q, q, 1.0);
  }
  void deliver_all() {
    std::vector<int32_t> rows;
    std::vector<int64_t> offsets = {0};
    for (size_t row = 0; row < samples.size(); ++row) {
      rows.push_back(static_cast<int32_t>(row));
      offsets.push_back(offsets.back() + static_cast<int64_t>(samples[row].tokens.size()) - 1);
    }
    observer.outputs(rows, offsets);
  }
  // The value behind "name=" in the last line that begins with `start`, "" if there is none.
  std::string field(const std::string& start, const std::string& name) const {
    for (auto line = said.rbegin(); line != said.rend(); ++line) {
      if (line->rfind(start, 0) != 0) continue;
      const size_t at = line->find(" " + name + "=");
      if (at == std::string::npos) return "";
      const size_t begin = at + name.size() + 2;
      return line->substr(begin, line->find(' ', begin) - begin);
    }
    return "";
  }
  int64_t count(const std::string& start) const {
    return std::count_if(said.begin(), said.end(), [&](const std::string& line) {
      return line.rfind(start, 0) == 0;
    });
  }

  std::vector<Sample> samples;
  Lines said;
  SharingObserver observer;
};

const std::string kAudit = "[PS][audit][global_rank=0 tp_rank=0/1] summary:";
const std::string kLayer0 = "[PS][audit][global_rank=0 tp_rank=0/1 layer=0] runtime:";

TEST(SharingObserver, OnePassOfTheToyBatch) {
  Passage passage(config_of("layer"), testing::toy_samples());
  const trie::Plan plan = trie::plan(passage.samples, {});
  ASSERT_EQ(plan.blocks.size(), 1u);
  passage.prepare(plan);
  passage.run(plan, 0);
  passage.deliver_all();
  passage.observer.finish();
  EXPECT_EQ(passage.count("[PS][prepare] PATH 6: sharing detected"), 1);
  EXPECT_EQ(passage.count("[PS][attention]["), 4);  // two lines in each of two layers
  EXPECT_EQ(passage.count("[PS][backend] native attention: layer="), 2);
  EXPECT_EQ(passage.field(kAudit, "original_tokens"), "38");
  EXPECT_EQ(passage.field(kAudit, "kept_valid_tokens"), "17");
  EXPECT_EQ(passage.field(kAudit, "reused_valid_tokens"), "21");
  EXPECT_EQ(passage.field(kAudit, "expected_reused_prefix_tokens_per_layer"), "21");
  EXPECT_EQ(passage.field(kAudit, "t1"), "17");
  EXPECT_EQ(passage.field(kAudit, "segments"), "9");
  EXPECT_EQ(passage.field(kAudit, "forks"), "3");
  EXPECT_EQ(passage.field(kAudit, "blocks"), "1");
  // Rows 1, 2, 3, 4 reuse row 0 or 1, row 6 reuses row 5.
  EXPECT_EQ(passage.field(kAudit, "reuser_count"), "5");
  EXPECT_EQ(passage.field(kAudit, "actual_restore_count"), "5");
  EXPECT_EQ(passage.field(kLayer0, "stored_tokens"), "17");
  EXPECT_EQ(passage.field(kLayer0, "reuse_hit_count"), "5");
  EXPECT_EQ(passage.field(kLayer0, "expanded_kv_tokens"), "29");
  EXPECT_EQ(passage.field(kLayer0, "matches_expected"), "True");
}

// A chain of three rows, as the specification counts it.
TEST(SharingObserver, AChainOfThreeRows) {
  Passage passage(config_of("layer"),
                  testing::samples_from({{1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}}));
  const trie::Plan plan = trie::plan(passage.samples, {});
  passage.prepare(plan);
  passage.run(plan, 0);
  passage.deliver_all();
  passage.observer.finish();
  EXPECT_EQ(passage.field(kLayer0, "store_count"), "3");
  EXPECT_EQ(passage.field(kLayer0, "reuse_count"), "2");
  EXPECT_EQ(passage.field(kLayer0, "reuse_hit_count"), "2");
  EXPECT_EQ(passage.field(kLayer0, "reuse_miss_count"), "0");
  EXPECT_EQ(passage.field(kLayer0, "reused_prefix_tokens"), "7");
  EXPECT_EQ(passage.field(kLayer0, "expanded_kv_tokens"), "12");
  EXPECT_EQ(passage.field(kLayer0, "valid_q_tokens"), "5");
}

// Cut with carried keys: every token still runs once, and reuse crosses the blocks.
TEST(SharingObserver, ACutPassCountsEachTokenOnce) {
  for (const std::vector<int32_t>& cuts :
       {std::vector<int32_t>{3, 6, 8, 12}, {1, 2, 3, 4, 5, 9, 13}, {6}, {2, 11}, {3}}) {
    Passage passage(config_of("layer"), testing::toy_samples());
    const trie::Plan plan =
        trie::plan_with_cuts(passage.samples, cuts, trie::CarryPolicy::kRecompute);
    passage.prepare(plan);
    for (const trie::Entry& entry : plan.entries) {
      if (entry.action == trie::Action::kForward) passage.run(plan, entry.block);
      if (entry.action == trie::Action::kRecompute) passage.run(plan, entry.block, true);
    }
    passage.deliver_all();
    passage.observer.finish();
    EXPECT_EQ(passage.field(kAudit, "kept_valid_tokens"), "17");
    EXPECT_EQ(passage.field(kAudit, "blocks"), std::to_string(plan.blocks.size()));
    EXPECT_EQ(passage.field(kLayer0, "reused_prefix_tokens"), "21");
    EXPECT_EQ(passage.field(kLayer0, "matches_expected"), "True");
    if (plan.num_recomputed > 0) {
      EXPECT_EQ(passage.field(kLayer0, "recomputed_q_tokens"), std::to_string(plan.num_recomputed));
    }
  }
}

// Whatever plan the planner makes: expected and measured agree, kept tokens are those computed.
TEST(SharingObserver, AnyPlanMatchesWhatItExpects) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Passage passage(config_of("layer"), testing::random_samples({.seed = seed, .vocab = 7}));
    trie::PlanOptions options;
    options.max_tokens_per_block = 8 + static_cast<int64_t>(seed % 20);
    options.carry = seed % 2 == 0 ? trie::Carry::kReplay : trie::Carry::kAuto;
    const trie::Plan plan = trie::plan(passage.samples, options);
    passage.prepare(plan);
    for (const trie::Entry& entry : plan.entries) {
      if (entry.action == trie::Action::kForward) passage.run(plan, entry.block);
    }
    passage.deliver_all();
    passage.observer.finish();
    if (passage.count("[PS][prepare] PATH 6: ") == 0) continue;
    EXPECT_EQ(passage.field(kAudit, "kept_valid_tokens"), std::to_string(plan.num_computed))
        << seed;
    EXPECT_EQ(passage.field(kAudit, "reused_valid_tokens"),
              std::to_string(plan.num_logical - plan.num_computed));
    EXPECT_EQ(passage.field(kLayer0, "reused_prefix_tokens"),
              std::to_string(plan.num_logical - plan.num_computed));
    EXPECT_EQ(passage.field(kLayer0, "matches_expected"), "True") << seed;
    EXPECT_EQ(passage.field(kAudit, "actual_restore_count"),
              passage.field(kAudit, "expected_restore_count"));
  }
}

// The figures are the run's: more tokens than planned, a skipped block, missing outputs show.
TEST(SharingObserver, ARunThatDiffersFromItsPlanIsSeen) {
  Passage more(config_of("layer"), testing::toy_samples());
  trie::Plan plan = trie::plan(more.samples, {});
  more.prepare(plan);
  more.run(plan, 0, false, /*extra=*/4);
  more.observer.finish();
  EXPECT_EQ(more.field(kAudit, "kept_valid_tokens"), "21");
  EXPECT_EQ(more.field(kAudit, "reused_valid_tokens"), "17");
  EXPECT_EQ(more.field(kAudit, "actual_restore_count"), "0");

  Passage late(config_of("layer"), testing::toy_samples());
  plan = trie::plan_with_cuts(late.samples, {3}, trie::CarryPolicy::kRetain);
  late.prepare(plan);
  late.run(plan, 1);  // before the block that holds its trunk
  late.run(plan, 0);
  late.observer.finish();
  EXPECT_NE(late.field(kLayer0, "reuse_miss_count"), "0");
  EXPECT_EQ(late.field(kLayer0, "matches_expected"), "False");

  Passage never(config_of("summary"), testing::toy_samples());
  never.prepare(plan);
  never.observer.finish();
  EXPECT_EQ(never.count("[PS][audit][global_rank=0 tp_rank=0/1] runtime_missing: "
                        "expected_reused_counts_per_layer=5"),
            1);
}

TEST(SharingObserver, NothingToShareAndSwitchedOff) {
  Passage lone(config_of("summary"), testing::samples_from({{1, 2}, {3, 4}}));
  const trie::Plan plan = trie::plan(lone.samples, {});
  lone.prepare(plan);
  lone.run(plan, 0);
  lone.observer.finish();
  EXPECT_EQ(lone.said.back(), sharing_log::no_sharing("on"));
  EXPECT_EQ(lone.count("[PS][audit]"), 0);

  SharingConfig config = config_of("summary");
  config.mode = "off";
  Passage off(config, testing::toy_samples());
  trie::PlanOptions unshared;
  unshared.build.share = false;
  off.prepare(trie::plan(off.samples, unshared));
  EXPECT_EQ(off.said.back(), sharing_log::disabled());
  EXPECT_EQ(off.count("[PS][prepare] PATH"), 1);
}

TEST(SharingObserver, LevelsChooseTheLines) {
  const auto lines_at = [](const std::string& level) {
    auto passage = std::make_unique<Passage>(config_of(level), testing::toy_samples());
    const trie::Plan plan = trie::plan(passage->samples, {});
    passage->prepare(plan);
    passage->run(plan, 0);
    passage->deliver_all();
    passage->observer.finish();
    return passage;
  };
  EXPECT_TRUE(lines_at("off")->said.empty());
  const auto summary = lines_at("summary");
  EXPECT_EQ(summary->count("[PS][attention]"), 0);
  EXPECT_EQ(summary->count(kAudit), 1);
  EXPECT_EQ(summary->count("[PS][nopadding]"), 1);
  EXPECT_EQ(summary->count("[PS][restore_verl080] unfolded B=7 L_max=8, restored reusers=3"), 1);
  const auto layer = lines_at("layer");
  EXPECT_EQ(layer->count(kLayer0), 1);
  EXPECT_EQ(layer->count("[PS][profile]"), 0);
  EXPECT_EQ(lines_at("profile")->count("[PS][profile]"), 2);
  const auto debug = lines_at("debug");
  EXPECT_EQ(debug->count("[PS][forward_step]"), 5);
  EXPECT_EQ(debug->count("[PS][prepare] use_remove_padding=True"), 1);
  EXPECT_EQ(summary->count("[PS][forward_step]"), 0);
}

TEST(SharingObserver, PassesAreCountedInAllAndByKind) {
  Passage passage(config_of("summary"), testing::toy_samples());
  const trie::Plan plan = trie::plan(passage.samples, {});
  for (const char* name : {"ref_log_prob", "update", "update"}) {
    passage.prepare(plan, name);
    passage.run(plan, 0);
    passage.observer.finish();
  }
  EXPECT_EQ(passage.field(kAudit, "forward_id"), "3");
  EXPECT_EQ(passage.field(kAudit, "micro_batch_id"), "2");
}

// The older rule leaves out the rows that come before the group is large enough; the trie shares
// them, and the audit shows that more was reused than that rule expects.
TEST(SharingObserver, TheOlderRuleExpectsLessThanTheTrieReuses) {
  SharingConfig config = config_of("layer", "trie_online");
  config.min_group_size = 3;
  Passage passage(config, testing::samples_from({{1, 2, 10}, {1, 2, 20}, {1, 2, 30}}));
  trie::PlanOptions options;
  options.build.min_group_size = 3;
  const trie::Plan plan = trie::plan(passage.samples, options);
  passage.prepare(plan);
  passage.run(plan, 0);
  passage.observer.finish();
  EXPECT_EQ(passage.field(kAudit, "expected_reused_prefix_tokens_per_layer"), "2");
  EXPECT_EQ(passage.field(kAudit, "reused_valid_tokens"), "4");
  EXPECT_EQ(passage.field(kLayer0, "matches_expected"), "False");
}

// A real model under a real walk: the same bits with and without the observer, and figures that
// come from its layers.
TEST(SharingObserver, AWalkOfAModelIsSeenAndNotChanged) {
  for (const bool whole : {false, true}) {
    Passage passage(config_of("profile"), testing::toy_samples());
    const trie::Plan plan =
        trie::plan_with_cuts(passage.samples, {3, 6, 8, 12}, trie::CarryPolicy::kRecompute);
    std::vector<at::Tensor> gradients[2];
    for (const bool observed : {false, true}) {
      const auto model = models::random_model(
          testing::tiny_config_json(), /*seed=*/3, {{.dtype = at::kBFloat16}, true});
      if (observed) passage.prepare(plan);
      walk(
          *model,
          plan,
          {.temperature = 1.0, .with_entropy = true},
          whole ? LossScope::kMiniBatch : LossScope::kSample,
          [](const std::vector<int32_t>&, const TokenOutputs& outputs) {
            return TokenGradients{at::full_like(outputs.value, 0.5), at::Tensor()};
          },
          observed ? &passage.observer : nullptr);
      for (const Param& param : model->params().params()) gradients[observed].push_back(param.grad);
    }
    passage.observer.finish();
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      EXPECT_TRUE(at::equal(gradients[0][i], gradients[1][i])) << i;
    }
    EXPECT_EQ(passage.field(kAudit, "kept_valid_tokens"), "17");
    EXPECT_EQ(passage.field(kAudit, "blocks"), "5");
    EXPECT_EQ(passage.field(kAudit, "actual_restore_count"), "5");
    EXPECT_EQ(passage.count("[PS][audit][global_rank=0 tp_rank=0/1 layer="), 2);
    EXPECT_EQ(passage.field(kLayer0, "matches_expected"), "True");
    EXPECT_NE(passage.field(kLayer0, "recomputed_q_tokens"), "");
    EXPECT_EQ(passage.count("[PS][profile][global_rank=0 tp_rank=0/1 layer=1] attention: "), 1);
    EXPECT_EQ(passage.count("[PS][attention]["), 2 * 2 * 5);  // two lines, two layers, five blocks
  }
}

TEST(SharingObserver, AScoringPassIsSeen) {
  Passage passage(config_of("summary"), testing::toy_samples());
  trie::PlanOptions options;
  options.for_backward = false;
  const trie::Plan plan = trie::plan(passage.samples, options);
  const auto model =
      models::random_model(testing::tiny_config_json(), /*seed=*/3, {{.dtype = at::kFloat}, false});
  passage.prepare(plan);
  score_samples(*model, plan, {}, &passage.observer);
  passage.observer.finish();
  EXPECT_EQ(passage.field(kAudit, "kept_valid_tokens"), "17");
  EXPECT_EQ(passage.field(kAudit, "actual_restore_count"), "5");
}

}  // namespace
}  // namespace banyan::train
