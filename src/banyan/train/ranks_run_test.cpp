// Whole runs over data-parallel ranks, which are threads here, give what one process gives; and
// what the ranks tell each other of a rollout.
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "banyan/testing/fake_host.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/layout_run.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/exchange.h"
#include "banyan/train/trainer.h"
#include "banyan/train/wire.h"

namespace banyan::train {
namespace {

using banyan::testing::FakeHost;
using banyan::testing::masters;
using banyan::testing::relative;
using banyan::testing::ScratchDir;
using banyan::testing::tiny_prompts;
using parallel::Collectives;

Score vowels(const Trajectory& trajectory) {
  Score score = testing::share_of_tokens(trajectory, [](int32_t token) { return token % 3 == 0; });
  score.extra = {{"length", static_cast<double>(trajectory.response.size())}};
  score.texts = {{"pred", std::to_string(trajectory.row)}};
  return score;
}

struct Ended : testing::Ended {
  TrainSummary summary;
};

// [ranks]
std::vector<Ended> run_on(int64_t size, const Config& config, int64_t stop_after = -1) {
  std::vector<Ended> ended(size);
  testing::run_ranks(size, [&](Collectives& ranks) {
    FakeHost host(tiny_prompts(config.num_train_rows), vowels);
    host.stop_after = ranks.rank() == size - 1 ? stop_after : -1;
    Ended& mine = ended[ranks.rank()];
    parallel::Groups groups = parallel::data_parallel(ranks);
    mine.summary = train(config, host, nullptr, &groups);
    mine.logged = host.logged;
    mine.trajectories = host.last_trajectories;
  });
  return ended;
}

}  // namespace

TEST(Ranks, ARunEqualsThatOfOneProcess) {
  const ScratchDir scratch("ranks");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "one");
  config.rollout.dtype = "float32";
  config.actor.use_kl_loss = true;
  config.actor.ppo_mini_batch_size = 2;
  config.trainer.total_training_steps = 3;
  config.trainer.val_before_train = true;
  config.trainer.test_freq = 2;
  FakeHost host(tiny_prompts(), vowels);
  train(config, host);
  const auto wanted = masters(scratch / "one/global_step_3");

  config.trainer.default_local_dir = scratch / "two";
  const std::vector<Ended> ended = run_on(2, config);
  for (const Ended& rank : ended) {
    testing::expect_same_run(rank, {host.logged, host.last_trajectories}, "two");
    EXPECT_GE(rank.logged.at(1).at("trie/dp_imbalance"), 1.0);
    // Two updates: the gradient of N numbers goes once through the ranks, N (n - 1) / n of each.
    int64_t num_elements = 0;
    for (const auto& [name, tensor] : wanted) num_elements += tensor.numel();
    EXPECT_EQ(rank.logged.at(1).at("comm/dp/all_to_all_bytes"), 2 * num_elements * 4 / 2);
  }
  for (const auto& [name, tensor] : masters(scratch / "two/global_step_3")) {
    EXPECT_LE(relative(tensor, wanted.at(name)), 1e-4) << name;
  }
  EXPECT_EQ(host.logged.at(1).count("trie/dp_imbalance"), 0U);
}

// In bf16 a row's bits do not depend on its batch, so the first rollout has the bits of one
// process.
TEST(Ranks, TheFirstRolloutHasTheBitsOfOneProcess) {
  const ScratchDir scratch("ranks-bits");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "one");
  config.trainer.total_training_steps = 1;
  FakeHost host(tiny_prompts(), vowels);
  train(config, host);
  config.trainer.default_local_dir = scratch / "five";
  for (const Ended& rank : run_on(5, config)) {  // four prompts: one has none
    ASSERT_EQ(rank.trajectories.size(), host.last_trajectories.size());
    for (size_t i = 0; i < rank.trajectories.size(); ++i) {
      EXPECT_EQ(rank.trajectories[i].response, host.last_trajectories[i].response);
      EXPECT_EQ(rank.trajectories[i].rollout_log_probs,
                host.last_trajectories[i].rollout_log_probs);
    }
    EXPECT_EQ(rank.logged.at(1).at("training/rollout_probs_diff_max"), 0.0);
    EXPECT_EQ(rank.logged.at(1).at("actor/ratio_deviation_max"), 0.0);
  }
}

TEST(Ranks, AResumedRunHasTheBitsOfOneThatNeverStopped) {
  const ScratchDir scratch("ranks-resume");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "whole");
  run_on(2, config);
  config.trainer.default_local_dir = scratch / "parts";
  // One rank is asked to stop: all do.
  for (const Ended& rank : run_on(2, config, /*stop_after=*/2)) {
    EXPECT_TRUE(rank.summary.stopped_early);
    EXPECT_EQ(rank.summary.last_step, 2);
  }
  for (const Ended& rank : run_on(2, config)) EXPECT_EQ(rank.summary.first_step, 2);
  const auto whole = masters(scratch / "whole/global_step_4");
  for (const auto& [name, tensor] : masters(scratch / "parts/global_step_4")) {
    EXPECT_TRUE(tensor.equal(whole.at(name))) << name;
  }
}

TEST(Ranks, ACriticAndWholeBatchStatisticsEqualOneProcess) {
  const ScratchDir scratch("ranks-critic");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "one");
  config.rollout.dtype = "float32";
  config.trainer.total_training_steps = 2;
  for (const char* estimator : {"gae", "reinforce_plus_plus"}) {
    config.algorithm.adv_estimator = estimator;
    config.trainer.default_local_dir = scratch / (std::string("one-") + estimator);
    FakeHost host(tiny_prompts(), vowels);
    train(config, host);
    config.trainer.default_local_dir = scratch / (std::string("two-") + estimator);
    const std::vector<Ended> ended = run_on(2, config);
    for (const char* name : {"actor/loss", "actor/grad_norm", "critic/advantages/mean"}) {
      EXPECT_NEAR(ended[1].logged.at(2).at(name), host.logged.at(2).at(name), 1e-4) << name;
    }
    if (std::string(estimator) != "gae") continue;
    for (const char* name : {"critic/loss", "critic/grad_norm", "critic/vpred_mean"}) {
      EXPECT_NEAR(ended[0].logged.at(2).at(name), host.logged.at(2).at(name), 1e-4) << name;
    }
  }
}

// Each rank ends its rollout when its share of the groups is whole; what is cut off goes on in the
// next step, on whichever rank, and survives a restart.
TEST(Ranks, CutOffGroupsGoOnInTheNextStep) {
  const ScratchDir scratch("ranks-partial");
  Config config = testing::tiny_config(testing::write_tiny_model(scratch), scratch / "whole");
  config.rollout.over_sample_rate = 0.34;  // seven groups are started; each rank ends after two
  config.rollout.max_num_seqs = 10;        // of its own, and runs two and a half at a time
  config.rollout.response_length = 24;
  config.num_train_rows = 24;
  config.partial_rollout = true;
  const std::vector<Ended> whole = run_on(2, config);
  double resumed = 0.0;
  for (const auto& [step, metrics] : whole[0].logged) {
    EXPECT_EQ(metrics, [&] {
      Metrics other = whole[1].logged.at(step);
      for (auto& [name, value] : other) {
        if (testing::is_layout(name)) value = metrics.at(name);
      }
      return other;
    }());
    resumed += metrics.at("rollout/resumed_responses");
  }
  EXPECT_GT(resumed, 0.0);
  config.trainer.default_local_dir = scratch / "parts";
  run_on(2, config, /*stop_after=*/2);
  run_on(2, config);
  const auto wanted = masters(scratch / "whole/global_step_4");
  for (const auto& [name, tensor] : masters(scratch / "parts/global_step_4")) {
    EXPECT_TRUE(tensor.equal(wanted.at(name))) << name;
  }
}

TEST(Ranks, EveryRankHoldsAllOfARollout) {
  const auto trajectory = [](int64_t row) {
    Trajectory t;
    t.row = row;
    t.index = 1;
    t.prompt = {1, 2, static_cast<int32_t>(row)};
    t.response = {3, 4};
    t.response_mask = {1, 0};
    t.rollout_log_probs = {-0.5F, -1.0F / 3.0F};
    t.sampled_log_probs = {-0.25F, 0.0F};
    t.reward_model_score = 0.1 + static_cast<double>(row);
    t.finish = FinishReason::kLength;
    t.weight_spans = {{.epoch = 7, .version = "v7", .start = 0, .end = 2}};
    return t;
  };
  testing::run_ranks(3, [&](Collectives& ranks) {
    RolloutResult own;
    const int64_t row = 2 - ranks.rank();
    own.trajectories = {trajectory(row)};
    own.scores = {vowels(own.trajectories[0])};
    own.scores[0].failed = true;
    own.scores[0].reason = "rank " + std::to_string(ranks.rank());
    own.stats.response_tokens = 2;
    own.generate_seconds = static_cast<double>(ranks.rank());
    const RolloutResult all = exchange(std::move(own), ranks);
    EXPECT_EQ(all.stats.response_tokens, 6);
    EXPECT_EQ(all.generate_seconds, 2.0);
    ASSERT_EQ(all.trajectories.size(), 3U);
    for (int64_t i = 0; i < 3; ++i) {
      const Trajectory wanted = trajectory(i);
      const Trajectory& got = all.trajectories[i];
      EXPECT_EQ(got.row, i);
      EXPECT_EQ(got.index, 1);
      EXPECT_EQ(got.prompt, wanted.prompt);
      EXPECT_EQ(got.response, wanted.response);
      EXPECT_EQ(got.response_mask, wanted.response_mask);
      EXPECT_EQ(got.rollout_log_probs, wanted.rollout_log_probs);
      EXPECT_EQ(got.sampled_log_probs, wanted.sampled_log_probs);
      EXPECT_EQ(got.reward_model_score, wanted.reward_model_score);
      EXPECT_EQ(got.finish, FinishReason::kLength);
      EXPECT_EQ(got.weight_spans[0].version, "v7");
      EXPECT_EQ(all.scores[i].reason, "rank " + std::to_string(i));
      EXPECT_TRUE(all.scores[i].failed);
      EXPECT_EQ(all.scores[i].extra[0].first, "length");
      EXPECT_EQ(all.scores[i].texts[0].second, std::to_string(2 - i));
    }
  });
}

TEST(Wire, ValuesComeBackAsTheyWere) {
  WireWriter out;
  out.put(int64_t{-3});
  out.put(std::string("text"));
  out.put(std::vector<float>{1.5F, -2.0F});
  out.put(std::vector<std::string>{"", "b"});
  out.put(at::arange(3, at::kDouble));
  out.put(at::Tensor());
  out.put(at::arange(2, at::kFloat));
  WireReader in(out.bytes());
  EXPECT_EQ(in.next<int64_t>(), -3);
  EXPECT_EQ(in.next<std::string>(), "text");
  EXPECT_EQ(in.next<std::vector<float>>(), (std::vector<float>{1.5F, -2.0F}));
  EXPECT_EQ(in.next<std::vector<std::string>>(), (std::vector<std::string>{"", "b"}));
  EXPECT_TRUE(in.next<at::Tensor>().equal(at::arange(3, at::kDouble)));
  EXPECT_FALSE(in.next<at::Tensor>().defined());
  EXPECT_TRUE(in.next<at::Tensor>().equal(at::arange(2, at::kFloat)));
  EXPECT_THROW(in.next<int64_t>(), std::logic_error);
}

}  // namespace banyan::train
