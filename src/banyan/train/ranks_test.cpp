// Data parallel: ranks that share the samples of a step give what one process gives. The ranks are
// threads here; tests/distributed runs the same over processes. Whole runs are in
// ranks_run_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/spread.h"
#include "banyan/train/update.h"

namespace banyan::train {
namespace {

using banyan::testing::all_of;
using banyan::testing::batch_of_five;
using banyan::testing::expect_near;
using banyan::testing::relative;
using banyan::testing::small_blocks;
using parallel::Collectives;

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

}  // namespace banyan::train
