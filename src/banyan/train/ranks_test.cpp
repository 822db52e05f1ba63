// Data parallel: ranks that share the samples of a step give what one process gives. The ranks are
// threads here; tests/distributed runs the same over processes.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>

#include "banyan/testing/fake_host.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/exchange.h"
#include "banyan/train/spread.h"
#include "banyan/train/trainer.h"
#include "banyan/train/update.h"
#include "banyan/train/wire.h"

namespace banyan::train {
namespace {

using banyan::testing::all_of;
using banyan::testing::batch_of_five;
using banyan::testing::expect_near;
using banyan::testing::FakeHost;
using banyan::testing::masters;
using banyan::testing::relative;
using banyan::testing::ScratchDir;
using banyan::testing::small_blocks;
using banyan::testing::tiny_prompts;
using parallel::Collectives;

Score vowels(const Trajectory& trajectory) {
  Score score = testing::share_of_tokens(trajectory, [](int32_t token) { return token % 3 == 0; });
  score.extra = {{"length", static_cast<double>(trajectory.response.size())}};
  score.texts = {{"pred", std::to_string(trajectory.row)}};
  return score;
}

struct Trained {
  UpdateResult first;  // of the first update
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> changes;  // of the weights over three steps
};

// `shard`: each rank steps its part of the numbers.
Trained three_steps(
    Config config, at::ScalarType dtype, bool share, Collectives* ranks, bool shard = false) {
  const auto model = models::random_model(testing::tiny_config_json(), 3, {{.dtype = dtype}, true});
  optim::AdamW optimizer(
      model->params(), adamw_options(config.actor.optim), shard ? ranks : nullptr);
  const Batch batch = batch_of_five();
  Layout layout{share, {}};
  layout.ranks = ranks;
  std::vector<at::Tensor> before;
  for (const Param& param : model->params().params()) before.push_back(param.master.clone());
  Trained out;
  for (int step = 0; step < 3; ++step) {
    UpdateResult result =
        update(config, batch, all_of(batch), layout, /*verify=*/step == 1, 1e-3, *model, optimizer);
    if (step > 0) continue;
    out.first = std::move(result);
    for (const Param& param : model->params().params()) out.gradients.push_back(param.grad.clone());
  }
  for (size_t i = 0; i < before.size(); ++i) {
    out.changes.push_back(model->params().params()[i].master.sub(before[i]));
  }
  return out;
}

// What a run logged, and the responses of its last step, by rank.
struct Ended {
  std::map<int64_t, Metrics> logged;
  std::vector<Trajectory> trajectories;
  TrainSummary summary;
};

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

bool is_measured(const std::string& name) {
  return name.starts_with("timing") || name.starts_with("perf/") || name.starts_with("actor/perf/");
}

// These say how the work was laid out over ranks.
bool is_layout(const std::string& name) {
  return name.starts_with("global_seqlen/") || name.starts_with("trie/") ||
         name.starts_with("comm/") || name == "rollout/computed_prompt_tokens";
}

}  // namespace

TEST(Ranks, UpdatesEqualOneProcess) {
  const Config config = small_blocks();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const double bound = dtype == at::kDouble ? 1e-10 : 1e-5;
    for (const bool share : {true, false}) {
      const Trained one = three_steps(config, dtype, share, nullptr);
      EXPECT_GT(one.first.num_blocks, 3);
      for (const int64_t size : {2, 4, 16}) {  // sixteen: one has no sample
        testing::run_ranks(size, [&](Collectives& ranks) {
          const Trained mine = three_steps(config, dtype, share, &ranks);
          const std::string what = std::to_string(size) + " ranks, share " + (share ? "on" : "off");
          EXPECT_NEAR(mine.first.loss.loss, one.first.loss.loss, bound) << what;
          EXPECT_EQ(mine.first.num_tokens, one.first.num_tokens);
          EXPECT_EQ(mine.first.logical_tokens, one.first.logical_tokens);
          EXPECT_NEAR(mine.first.grad_norm / one.first.grad_norm, 1.0, bound) << what;
          expect_near(mine.gradients, one.gradients, bound, what + " gradient");
          expect_near(mine.changes, one.changes, dtype == at::kDouble ? 1e-8 : 1e-3, what);
          for (size_t k = 0; k < one.first.log_prob.size(); ++k) {
            EXPECT_LE(relative(mine.first.log_prob[k], one.first.log_prob[k]), bound) << what;
          }
          EXPECT_GE(mine.first.dp_imbalance, 1.0);
        });
      }
    }
  }
}

// clip_cov chooses among all tokens of the mini-batch, kl_cov ranks them.
TEST(Ranks, LossesOverTheWholeMiniBatchEqualOneProcess) {
  Config config = small_blocks();
  config.actor.policy_loss.clip_cov_ratio = 0.2;
  config.actor.policy_loss.clip_cov_lb = 0.0;
  config.actor.policy_loss.kl_cov_ratio = 0.2;
  config.actor.entropy_coeff = 0.01;
  for (const char* loss : {"clip_cov", "kl_cov"}) {
    config.actor.policy_loss.loss_mode = loss;
    const Trained one = three_steps(config, at::kDouble, /*share=*/true, nullptr);
    for (const int64_t size : {2, 16}) {
      testing::run_ranks(size, [&](Collectives& ranks) {
        const Trained mine = three_steps(config, at::kDouble, /*share=*/true, &ranks);
        EXPECT_NEAR(mine.first.loss.loss, one.first.loss.loss, 1e-10) << loss;
        EXPECT_EQ(mine.first.loss.clipped_tokens, one.first.loss.clipped_tokens) << loss;
        expect_near(mine.gradients, one.gradients, 1e-10, std::string(loss) + " gradient");
      });
    }
  }
}

// ZeRO-1: who steps a number makes no difference to it.
TEST(Ranks, AShardedOptimizerHasTheBitsOfAWholeOne) {
  Config config = small_blocks();
  for (const double clip : {0.0, 1.0}) {
    config.actor.optim.clip_grad = clip;
    for (const int64_t size : {2, 3}) {
      testing::run_ranks(size, [&](Collectives& ranks) {
        const Trained whole = three_steps(config, at::kFloat, /*share=*/true, &ranks);
        const Trained sharded = three_steps(config, at::kFloat, /*share=*/true, &ranks, true);
        EXPECT_NEAR(sharded.first.grad_norm / whole.first.grad_norm, 1.0, 1e-12);
        for (size_t i = 0; i < whole.changes.size(); ++i) {
          EXPECT_TRUE(sharded.changes[i].equal(whole.changes[i])) << i << " clip " << clip;
        }
      });
    }
  }
}

TEST(Ranks, MomentsAreSharedOutAndComeTogether) {
  const auto fresh = [] {
    return models::random_model(testing::tiny_config_json(), 3, {{.dtype = at::kFloat}, true});
  };
  const auto one = fresh();
  optim::AdamW alone(one->params(), {});
  one->params().ensure_grads();
  for (Param& param : one->params().params()) param.grad.fill_(0.25);
  alone.step(1e-3, 1.0);
  testing::run_ranks(3, [&](Collectives& ranks) {
    const auto model = fresh();
    optim::AdamW optimizer(model->params(), {}, &ranks);
    model->params().ensure_grads();
    for (Param& param : model->params().params()) param.grad.fill_(0.25 / 3.0);
    optimizer.reduce_gradients();
    optimizer.step(1e-3, 1.0);
    optimizer.gather_moments();
    for (size_t i = 0; i < alone.first_moments().size(); ++i) {
      EXPECT_LE(relative(optimizer.first_moments()[i], alone.first_moments()[i]), 1e-6);
      EXPECT_LE(relative(optimizer.second_moments()[i], alone.second_moments()[i]), 1e-6);
    }
    optimizer.take_moments();
    EXPECT_TRUE(optimizer.first_moments().empty());
  });
}

TEST(Ranks, TwoRunsHaveTheSameBitsAndSoDoAllRanks) {
  const Config config = small_blocks();
  std::vector<std::vector<at::Tensor>> changes;
  std::mutex mutex;
  for (int run = 0; run < 2; ++run) {
    testing::run_ranks(3, [&](Collectives& ranks) {
      Trained mine = three_steps(config, at::kFloat, /*share=*/true, &ranks);
      const std::lock_guard lock(mutex);
      changes.push_back(std::move(mine.changes));
    });
  }
  for (const std::vector<at::Tensor>& other : changes) {
    for (size_t i = 0; i < other.size(); ++i) EXPECT_TRUE(other[i].equal(changes[0][i]));
  }
}

// What the ranks of a world take of a batch.
std::vector<Spread> spreads(const Batch& batch, int64_t size) {
  std::vector<Spread> out(size);
  testing::run_ranks(size, [&](Collectives& ranks) {
    out[ranks.rank()] = spread_groups(batch, all_of(batch).samples, {}, &ranks);
  });
  return out;
}

TEST(Ranks, EachSampleGoesToOneRank) {
  const Batch batch = batch_of_five();
  for (const int64_t size : {2, 3, 7, 20}) {
    std::multiset<int64_t> seen;
    for (const Spread& spread : spreads(batch, size)) {
      EXPECT_TRUE(std::is_sorted(spread.own.begin(), spread.own.end()));
      seen.insert(spread.own.begin(), spread.own.end());
    }
    const std::vector<int64_t> all = all_of(batch).samples;
    EXPECT_EQ(std::vector<int64_t>(seen.begin(), seen.end()), all) << size;
  }
}

// Four equal groups on two ranks stay whole; one group is halved, for all its trunk.
TEST(Ranks, AGroupIsHalvedOnlyWhereThatIsFaster) {
  Batch batch;
  for (int64_t row = 0; row < 4; ++row) {
    for (int32_t index = 0; index < 4; ++index) {
      Trajectory t;
      t.row = row;
      t.index = index;
      t.prompt.assign(50, static_cast<int32_t>(row));
      t.response = {static_cast<int32_t>(10 + index), 5, 6};
      t.response_mask.assign(3, 1);
      batch.trajectories.push_back(t);
      batch.scores.emplace_back();
    }
  }
  for (const Spread& spread : spreads(batch, 2)) {
    std::set<int64_t> rows;
    for (const int64_t k : spread.own) rows.insert(batch.trajectories[k].row);
    EXPECT_EQ(rows.size(), 2U);
    EXPECT_EQ(spread.own.size(), 8U);
    EXPECT_DOUBLE_EQ(spread.imbalance, 1.0);
  }
  batch.trajectories.resize(4);
  batch.scores.resize(4);
  for (Trajectory& t : batch.trajectories) t.response.assign(400, 10 + t.index);
  for (Trajectory& t : batch.trajectories) t.response_mask.assign(400, 1);
  for (const Spread& spread : spreads(batch, 2)) EXPECT_EQ(spread.own.size(), 2U);
}

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
    ASSERT_EQ(rank.logged.size(), host.logged.size());
    for (const auto& [step, metrics] : host.logged) {
      for (const auto& [name, value] : metrics) {
        if (is_measured(name) || is_layout(name)) continue;
        EXPECT_NEAR(rank.logged.at(step).at(name), value, 1e-4 * std::max(1.0, std::abs(value)))
            << name << " step " << step;
      }
    }
    ASSERT_EQ(rank.trajectories.size(), host.last_trajectories.size());
    for (size_t i = 0; i < rank.trajectories.size(); ++i) {
      EXPECT_EQ(rank.trajectories[i].response, host.last_trajectories[i].response);
    }
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
        if (is_measured(name) || is_layout(name)) value = metrics.at(name);
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
