// Every algorithm through the whole loop on a tiny model: PPO with a critic, KL in the reward,
// group filters, baselines, corrections, reward models; what they need is carried from rollout to
// loss.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "banyan/algo/loss.h"
#include "banyan/algo/user_function.h"
#include "banyan/testing/fake_host.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/advantage_stage.h"
#include "banyan/train/critic.h"
#include "banyan/train/trainer.h"

namespace banyan::train {
namespace {

using banyan::testing::FakeHost;
using banyan::testing::ScratchDir;

constexpr int32_t kLuckyToken = 7;

Score lucky_share(const Trajectory& trajectory) {
  double lucky = 0.0;
  for (const int32_t token : trajectory.response) lucky += token == kLuckyToken ? 1.0 : 0.0;
  Score score;
  score.row = trajectory.row;
  score.index = trajectory.index;
  score.value = lucky / static_cast<double>(trajectory.response.size());
  score.extra = {{"length", static_cast<double>(trajectory.response.size())},
                 {"lucky", score.value}};
  return score;
}

using Tensors = std::map<std::string, at::Tensor>;

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(tensor.equal(b.at(name))) << name;
}

// A run's folder and configuration; `train` runs it with a fresh host.
struct TinyRun {
  explicit TinyRun(const std::string& name)
      : scratch(name), config(testing::tiny_config(testing::write_tiny_model(scratch), "")) {
    config.trainer.default_local_dir = scratch / "run";
  }
  FakeHost train(FakeHost::Reward reward = lucky_share, int64_t stop_after = -1) {
    FakeHost host(testing::tiny_prompts(), std::move(reward));
    host.stop_after = stop_after;
    summary = banyan::train::train(config, host);
    return host;
  }

  ScratchDir scratch;
  Config config;
  TrainSummary summary;
};

TEST(Ppo, TheCriticLearnsToPredictTheReturn) {
  TinyRun run("critic");
  run.config.algorithm.adv_estimator = "gae";
  run.config.trainer.total_training_steps = 30;
  run.config.actor.optim.lr = 1e-3;
  run.config.critic.optim.lr = 3e-3;
  const FakeHost host = run.train();
  EXPECT_NE(host.said[0].find("no value head there"), std::string::npos);
  const Metrics& first = host.logged.at(1);
  for (const char* name : {"critic/vf_loss",
                           "critic/vf_clipfrac",
                           "critic/vpred_mean",
                           "critic/values/mean",
                           "critic/grad_norm",
                           "critic/lr",
                           "timing_s/values",
                           "timing_s/update_critic"}) {
    EXPECT_TRUE(first.contains(name)) << name;
  }
  EXPECT_LT(host.logged.at(30).at("critic/vf_loss"), 0.5 * first.at("critic/vf_loss"));
  EXPECT_GT(first.at("actor/grad_norm"), 0.0);
}

TEST(Ppo, WarmUpTrainsTheCriticAlone) {
  TinyRun run("warmup");
  run.config.algorithm.adv_estimator = "gae";
  run.config.trainer.critic_warmup = 3;
  run.config.trainer.save_freq = 1;
  run.config.trainer.total_training_steps = 3;
  const FakeHost host = run.train();
  const std::string folder = run.scratch / "run";
  const Tensors first = testing::masters(folder + "/global_step_1");
  expect_equal(first, testing::masters(folder + "/global_step_2"));
  const std::string name = "model.norm.weight";
  EXPECT_FALSE(first.at(name).equal(testing::masters(folder + "/global_step_3").at(name)));
  EXPECT_FALSE(testing::masters(folder + "/global_step_1/critic")
                   .at(name)
                   .equal(testing::masters(folder + "/global_step_2/critic").at(name)));
  EXPECT_FALSE(host.logged.at(2).contains("actor/grad_norm"));
  EXPECT_TRUE(host.logged.at(2).contains("critic/grad_norm"));
  EXPECT_TRUE(host.logged.at(3).contains("actor/grad_norm"));
}

TEST(Ppo, ResumingGivesTheBitsOfNeverHavingStopped) {
  TinyRun run("ppo-resume");
  run.config.algorithm.adv_estimator = "gae";
  run.config.algorithm.use_kl_in_reward = true;
  run.config.algorithm.kl_ctrl = {
      .type = "adaptive", .kl_coef = 0.2, .horizon = 50.0, .target_kl = 0.01};
  run.config.actor.ppo_epochs = 2;
  run.config.critic.ppo_mini_batch_size = 2;
  run.config.critic.ppo_epochs = 2;
  run.config.critic.shuffle = true;
  const FakeHost undisturbed = run.train();
  const std::string whole = run.summary.checkpoint;

  run.config.trainer.default_local_dir = run.scratch / "stopped";
  run.train(lucky_share, /*stop_after=*/2);
  const FakeHost second = run.train();
  EXPECT_EQ(run.summary.first_step, 2);
  expect_equal(testing::masters(whole), testing::masters(run.summary.checkpoint));
  expect_equal(testing::masters(whole + "/critic"),
               testing::masters(run.summary.checkpoint + "/critic"));
  const char* coef = "actor/reward_kl_penalty_coeff";
  for (const int64_t step : {3, 4}) {
    EXPECT_EQ(undisturbed.logged.at(step).at(coef), second.logged.at(step).at(coef));
    EXPECT_EQ(undisturbed.logged.at(step).at("critic/grad_norm"),
              second.logged.at(step).at("critic/grad_norm"));
  }
  EXPECT_NE(undisturbed.logged.at(1).at(coef), undisturbed.logged.at(3).at(coef));
}

TEST(RewardKl, SubtractsWhatItLogs) {
  TinyRun run("reward-kl");
  run.config.algorithm.adv_estimator = "reinforce_plus_plus";
  run.config.algorithm.use_kl_in_reward = true;
  run.config.algorithm.kl_ctrl.kl_coef = 0.5;
  const FakeHost host = run.train();
  // The first step is on the reference itself; later ones are not.
  EXPECT_EQ(host.logged.at(1).at("actor/reward_kl_penalty"), 0.0);
  EXPECT_EQ(host.logged.at(1).at("critic/rewards/mean"), host.logged.at(1).at("critic/score/mean"));
  EXPECT_NE(host.logged.at(3).at("actor/reward_kl_penalty"), 0.0);
  EXPECT_NE(host.logged.at(3).at("critic/rewards/mean"), host.logged.at(3).at("critic/score/mean"));
}

// Rows with an even number give equal scores: they teach nothing.
Score even_rows_are_flat(const Trajectory& trajectory) {
  Score score = lucky_share(trajectory);
  score.value = trajectory.row % 2 == 0 ? 1.0 : static_cast<double>(trajectory.index);
  return score;
}

TEST(FilterGroups, DropsFlatGroupsAndRefills) {
  TinyRun run("filter");
  run.config.algorithm.filter_groups.enable = true;
  run.config.trainer.total_training_steps = 2;
  const FakeHost host = run.train(even_rows_are_flat);
  const Metrics& first = host.logged.at(1);
  // Rows 0-3, two of them flat; rows 4-7 in their place, again two flat.
  EXPECT_EQ(first.at("training/filter_groups/num_gen_batches"), 2.0);
  EXPECT_EQ(first.at("training/filter_groups/evicted_samples"), 16.0);
  EXPECT_EQ(first.at("training/rollout_failure/discarded_surplus_samples"), 0.0);
  EXPECT_EQ(first.at("training/flat_group_ratio"), 0.0);
  ASSERT_EQ(host.last_trajectories.size(), 16u);
  for (const Trajectory& trajectory : host.last_trajectories) EXPECT_EQ(trajectory.row % 2, 1);
}

TEST(FilterGroups, SurplusGroupsAreDropped) {
  TinyRun run("surplus");
  run.config.algorithm.filter_groups.enable = true;
  run.config.trainer.total_training_steps = 1;
  const FakeHost host = run.train([](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    score.value = trajectory.row == 0 ? 1.0 : static_cast<double>(trajectory.index);
    return score;
  });
  // One group is missing, two are drawn in its place, one is over.
  EXPECT_EQ(host.logged.at(1).at("training/rollout_failure/discarded_surplus_samples"), 4.0);
  EXPECT_EQ(host.last_trajectories.size(), 16u);
}

// A shuffled loader goes into its next epoch in the middle of a step and brings the step's own
// rows.
TEST(FilterGroups, RowsOfThisStepThatComeAgainAreDrawnOver) {
  TinyRun run("again");
  run.config.algorithm.filter_groups.enable = true;
  run.config.trainer.total_training_steps = 1;
  FakeHost host(testing::tiny_prompts(), [](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    score.value = trajectory.row == 0 ? 1.0 : static_cast<double>(trajectory.index);
    return score;
  });
  host.order = {0, 1, 2, 3, /*instead of row 0:*/ 2, 0, /*once more:*/ 5, 1};
  banyan::train::train(run.config, host);
  std::set<int64_t> rows;
  for (const Trajectory& trajectory : host.last_trajectories) rows.insert(trajectory.row);
  EXPECT_EQ(rows, (std::set<int64_t>{1, 2, 3, 5}));
  EXPECT_EQ(host.logged.at(1).at("training/filter_groups/num_gen_batches"), 2.0);
}

std::string refusal_of(TinyRun& run, FakeHost::Reward reward) {
  try {
    run.train(std::move(reward));
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(FilterGroups, LimitsAndAWrongMetricAreNamed) {
  TinyRun run("filter-limit");
  run.config.algorithm.filter_groups.enable = true;
  run.config.algorithm.filter_groups.max_num_gen_batches = 1;
  EXPECT_NE(refusal_of(run, even_rows_are_flat).find("2 of 4 groups differ in reward after 1"),
            std::string::npos);
  run.config.algorithm.filter_groups.max_num_gen_batches = 0;
  const auto constant = [](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    score.value = 1.0;
    return score;
  };
  EXPECT_NE(refusal_of(run, constant).find("every training row was tried"), std::string::npos);
  run.config.algorithm.filter_groups.metric = "acc";
  EXPECT_NE(refusal_of(run, constant).find("wanted one of reward, length, lucky"),
            std::string::npos);
}

TEST(Estimators, AUsersFunctionSeesTheNamedEntriesOfTheScorer) {
  TinyRun run("components");
  std::vector<double> seen;
  algo::set_user_advantage("mine.py:estimator",
                           [&](const algo::AdvantageInput& input, const algo::AdvantageOptions&) {
                             seen = input.components.at("length");
                             return algo::AdvantageResult{input.token_reward, input.token_reward};
                           });
  run.config.algorithm.adv_estimator = "mine.py:estimator";
  run.config.algorithm.gdpo_reward_keys = {{"length"}};
  run.config.trainer.total_training_steps = 1;
  const FakeHost host = run.train();
  ASSERT_EQ(seen.size(), host.last_trajectories.size());
  for (size_t i = 0; i < seen.size(); ++i) EXPECT_GE(seen[i], 1.0);
}

TEST(Estimators, EveryOneTrains) {
  for (const char* name : {"gae",
                           "grpo",
                           "grpo_passk",
                           "gdpo",
                           "reinforce_plus_plus",
                           "reinforce_plus_plus_baseline",
                           "rloo",
                           "opo",
                           "remax",
                           "gpg",
                           "optimal_token_baseline",
                           "tir_optimal_token_baseline"}) {
    SCOPED_TRACE(name);
    TinyRun run("estimator");
    run.config.algorithm.adv_estimator = name;
    run.config.algorithm.gdpo_reward_keys = {"length", "lucky"};
    run.config.trainer.total_training_steps = 1;
    const FakeHost host = run.train();
    EXPECT_GT(host.logged.at(1).at("actor/grad_norm"), 0.0);
    EXPECT_EQ(host.logged.at(1).at("training/rollout_probs_diff_max"), 0.0);
  }
}

// One step with a policy loss; blocks end after `micro` samples.
Metrics step_with_loss(const std::string& name, int64_t micro) {
  TinyRun run("loss");
  run.config.actor.policy_loss.loss_mode = name;
  run.config.actor.policy_loss.dro_beta = 0.1;
  run.config.actor.policy_loss.clip_cov_ratio = 0.1;
  run.config.actor.policy_loss.clip_cov_lb = -1.0;
  run.config.actor.policy_loss.kl_cov_ratio = 0.1;
  run.config.actor.ppo_mini_batch_size = 2;
  run.config.actor.ppo_micro_batch_size_per_gpu = micro;
  run.config.trainer.total_training_steps = 1;
  return run.train().logged.at(1);
}

TEST(Losses, EveryOneTrains) {
  for (const char* name : {"vanilla",
                           "dppo_tv",
                           "dppo_kl",
                           "gspo",
                           "sapo",
                           "gpg",
                           "clip_cov",
                           "kl_cov",
                           "geo_mean",
                           "dro",
                           "cispo"}) {
    EXPECT_GT(step_with_loss(name, 16).at("actor/grad_norm"), 0.0) << name;
  }
}

TEST(Losses, DoNotDependOnTheBlocks) {
  for (const char* name : {"gspo", "clip_cov", "kl_cov"}) {
    // bf16 weights after the first mini-batch differ by the rounding of its gradients.
    EXPECT_NEAR(
        step_with_loss(name, 16).at("actor/loss"), step_with_loss(name, 3).at("actor/loss"), 1e-3)
        << name;
  }
}

TEST(Remax, TheBaselineIsTheGreedyAnswersScore) {
  TinyRun run("remax");
  run.config.algorithm.adv_estimator = "remax";
  run.config.trainer.total_training_steps = 1;
  std::map<int64_t, double> greedy;
  const FakeHost host = run.train([&](const Trajectory& trajectory) {
    const Score score = lucky_share(trajectory);
    if (trajectory.index == 4) greedy[trajectory.row] = score.value;
    return score;
  });
  ASSERT_EQ(greedy.size(), 4u);
  double sum = 0.0;
  for (const auto& [row, value] : greedy) sum += value;
  EXPECT_NEAR(host.logged.at(1).at("critic/greedy_score/mean"), sum / 4.0, 1e-12);
}

TEST(PfPpo, TrainsOnDrawnRows) {
  TinyRun run("pf-ppo");
  run.config.algorithm.adv_estimator = "gae";
  run.config.algorithm.use_pf_ppo = true;
  run.config.algorithm.pf_ppo.reweight_method = "max_min";
  run.config.trainer.total_training_steps = 2;
  const FakeHost host = run.train();
  EXPECT_GT(host.logged.at(2).at("actor/grad_norm"), 0.0);
  run.config.algorithm.adv_estimator = "grpo";
  EXPECT_NE(refusal_of(run, lucky_share).find("algorithm.use_pf_ppo"), std::string::npos);
}

// Rollout and trainer agree bit for bit here, so every weight is 1 and nothing is rejected.
TEST(Correction, ChangesNothingWhereThereIsNothingToCorrect) {
  std::vector<Metrics> first;
  for (const bool bypass : {false, true}) {
    for (const bool corrects : {false, true}) {
      TinyRun run("correction");
      run.config.trainer.total_training_steps = 1;
      CorrectionConfig& correction = run.config.algorithm.rollout_correction;
      correction.bypass_mode = bypass;
      if (corrects) {
        correction.rollout_is = "token";
        correction.rollout_is_threshold = "2.0";
        correction.rollout_rs = "token_k1,seq_mean_k2";
        correction.rollout_rs_threshold = "2.0";
      }
      first.push_back(run.train().logged.at(1));
    }
  }
  for (const Metrics& metrics : first) {
    EXPECT_EQ(metrics.at("actor/pg_loss"), first[0].at("actor/pg_loss"));
    EXPECT_EQ(metrics.at("actor/grad_norm"), first[0].at("actor/grad_norm"));
    EXPECT_EQ(metrics.at("training/rollout_probs_diff_max"), 0.0);
  }
  EXPECT_FALSE(first[0].contains("rollout_corr/kl"));
  for (const size_t k : {1, 3}) {
    EXPECT_EQ(first[k].at("rollout_corr/kl"), 0.0);
    EXPECT_EQ(first[k].at("rollout_corr/rollout_is_mean"), 1.0);
    EXPECT_EQ(first[k].at("rollout_corr/rollout_rs_masked_fraction"), 0.0);
  }
}

TEST(Correction, RejectedTokensLeaveNAndB) {
  TinyRun run("rejection");
  run.config.trainer.total_training_steps = 1;
  // top-p makes the law that drew the tokens another one than the trained policy (T29).
  run.config.rollout.train.top_p = 0.5;
  CorrectionConfig& correction = run.config.algorithm.rollout_correction;
  correction.rollout_rs = "token_k1";
  correction.rollout_rs_threshold = "1.5";
  const FakeHost host = run.train();
  EXPECT_GT(host.logged.at(1).at("rollout_corr/rollout_rs_masked_fraction"), 0.0);
  EXPECT_EQ(host.logged.at(1).at("training/rollout_probs_diff_max"), 0.0);
}

TEST(VarianceProxy, IsThereWhereItsSumsAre) {
  TinyRun run("variance");
  run.config.actor.calculate_sum_pi_squared = true;
  run.config.trainer.total_training_steps = 1;
  const FakeHost host = run.train();
  const Metrics& metrics = host.logged.at(1);
  EXPECT_NEAR(metrics.at("variance_proxy/proxy1_signal_strength"),
              std::pow(metrics.at("actor/grad_norm"), 2),
              1e-9);
  EXPECT_GT(metrics.at("variance_proxy/proxy2_total_power"), 0.0);
}

// A reward model on disk: the tiny model with a value head, whose number the host passes on.
TEST(RewardModel, ScoresEveryResponseAtItsLastToken) {
  TinyRun run("reward-model");
  models::LoadOptions options{{.dtype = at::kFloat}, false};
  options.head = models::HeadKind::kValue;
  options.head_seed = 9;
  const auto model = models::load_model(run.config.model.path, options);
  model->params().at("score.weight").master.mul_(20.0);
  models::save_model(*model, run.config.model.path, run.scratch / "rm", at::kFloat);
  run.config.reward_model = {.enable = true, .model_path = run.scratch / "rm"};
  run.config.trainer.total_training_steps = 1;
  std::vector<double> scores;
  const FakeHost host = run.train([&](const Trajectory& trajectory) {
    Score score = lucky_share(trajectory);
    score.value = trajectory.reward_model_score.value();
    scores.push_back(score.value);
    return score;
  });
  EXPECT_EQ(scores.size(), 16u);
  EXPECT_NE(scores[0], scores[1]);
  EXPECT_NEAR(host.logged.at(1).at("critic/score/max"),
              *std::max_element(scores.begin(), scores.end()),
              1e-12);
  run.config.reward_model.model_path = run.config.model.path;
  EXPECT_NE(refusal_of(run, lucky_share).find("without one"), std::string::npos);
}

// Two assistant turns with an observation between them and one at the end (T22, T24, T42).
TEST(MultiTurn, RewardsAndAdvantagesCoverThePolicysTokensAlone) {
  TinyRun run("multi-turn");
  run.config.algorithm.adv_estimator = "gae";
  run.config.algorithm.gamma = 0.9;
  run.config.algorithm.rollout_correction.rollout_rs = "token_k1";
  run.config.algorithm.rollout_correction.rollout_rs_threshold = "2.0";
  Batch batch;
  for (int32_t index = 0; index < 2; ++index) {
    Trajectory trajectory;
    trajectory.index = index;
    trajectory.prompt = {5, 6};
    trajectory.response = {7, 8, 90, 91, 9, 92};
    trajectory.response_mask = {1, 1, 0, 0, 1, 0};
    trajectory.rollout_log_probs = {-1.0f, -1.0f, 0.0f, 0.0f, -1.0f, 0.0f};
    batch.trajectories.push_back(trajectory);
    Score score;
    score.index = index;
    score.value = 1.0 + index;
    batch.scores.push_back(score);
  }
  const at::Tensor values = token_lists({{0.5, 0.25, 0.125}})[0];
  batch.value = {values, values};
  // The third token of the second sample is far from what the rollout gave it.
  batch.old_log_prob = token_lists({{-1.0, -1.0, -1.0}, {-1.0, -1.0, 4.0}});
  set_advantages(run.config, 1, nullptr, batch);

  EXPECT_EQ(per_token(batch, batch.token_reward),
            (algo::PerToken{{0.0, 0.0, 1.0}, {0.0, 0.0, 2.0}}));
  // lam = 1: the return is the discounted score, as if the observations were not there.
  const algo::PerToken returns = per_token(batch, batch.returns);
  EXPECT_NEAR(returns[1][0], 0.9 * 0.9 * 2.0, 1e-12);
  EXPECT_NEAR(returns[1][2], 2.0, 1e-12);
  // Rejection leaves the advantages and takes the token out of the loss.
  EXPECT_EQ(per_token(batch, batch.keep), (algo::PerToken{{1.0, 1.0, 1.0}, {1.0, 1.0, 0.0}}));
  EXPECT_NE(per_token(batch, batch.advantage)[1][2], 0.0);
  EXPECT_EQ(batch.num_kept(1), 2);
  const Sample sample = samples_of(batch, {1})[0];
  EXPECT_EQ(sample.tokens, (std::vector<int32_t>{5, 6, 7, 8, 90, 91, 9, 92}));
  EXPECT_EQ(sample.scored, (std::vector<uint8_t>{0, 0, 1, 1, 0, 0, 1, 0}));
  // A sample of which nothing is left is no part of a mini-batch.
  batch.keep[0].zero_();
  EXPECT_EQ(mini_batches({.size = 2}, batch, 1)[0].samples, (std::vector<int64_t>{1}));
}

TEST(Sharing, AutoDecidesOncePerBatch) {
  TinyRun run("auto");
  run.config.sharing.mode = "auto";
  run.config.trainer.total_training_steps = 1;
  FakeHost host = run.train();
  EXPECT_EQ(host.logged.at(1).at("prefix/share"), 1.0);
  run.config.trainer.default_local_dir = run.scratch / "dense";
  run.config.sharing_margin = 0.99;
  host = run.train();
  EXPECT_EQ(host.logged.at(1).at("prefix/share"), 0.0);
  EXPECT_EQ(host.logged.at(1).at("trie/ratio"), 1.0);
}

TEST(Checks, ChoicesThatCannotWorkAreRefusedBeforeAModelLoads) {
  TinyRun run("checks");
  run.config.model.path = "no-such-model";
  const auto refusal = [&](auto change) {
    TinyRun* const one = &run;
    const Config before = one->config;
    change(one->config);
    const std::string text = refusal_of(*one, lucky_share);
    one->config = before;
    return text;
  };
  const auto expect = [&](auto change, const std::string& text) {
    const std::string got = refusal(change);
    EXPECT_NE(got.find(text), std::string::npos) << got;
  };
  expect([](Config& c) { c.rollout.train.n = 1; }, "group of one");
  expect([](Config& c) { c.algorithm.adv_estimator = "gae", c.critic.enable = false; },
         "critic.enable");
  expect([](Config& c) { c.trainer.critic_warmup = 3; }, "critic_warmup");
  expect([](Config& c) { c.algorithm.adv_estimator = "gdpo"; }, "gdpo_reward_keys");
  expect(
      [](Config& c) {
        c.algorithm.rollout_correction.rollout_is = "token",
        c.algorithm.rollout_correction.rollout_is_threshold.reset();
      },
      "rollout_is_threshold");
  expect(
      [](Config& c) {
        c.actor.policy_loss.loss_mode = "gspo", c.actor.loss_agg_mode = "token-mean";
      },
      "loss_agg_mode");
  expect([](Config& c) { c.actor.policy_loss.loss_mode = "dro"; }, "dro_beta");
  expect([](Config& c) { c.actor.use_kl_loss = true, c.actor.kl_loss_type = "k1"; }, "k1");
  expect([](Config& c) { c.reward_model.enable = true; }, "reward_model.model_path");
}

}  // namespace
}  // namespace banyan::train
