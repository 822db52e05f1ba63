// Context parallel: what ranks send is what the formulas say, two runs have the same bits, a critic
// is that of one process, and keys that do not go together are refused. The ranks are threads here.
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <mutex>

#include "banyan/testing/context_steps.h"
#include "banyan/train/critic.h"

namespace banyan::train {

using namespace banyan::testing::context;
using parallel::Groups;
using testing::all_of;
using testing::relative;

TEST(ContextRanks, TwoRunsHaveTheSameBits) {
  for (const ContextKind kind : {kRanges, kHeads}) {
    const Case with{.dtype = at::kBFloat16};
    std::vector<Named> all;
    std::mutex mutex;
    for (int run = 0; run < 2; ++run) {
      testing::run_mesh(4, {.cp = 2}, [&](Groups& groups) {
        Trained mine = three_steps(with, {.kind = kind}, groups);
        const std::lock_guard lock(mutex);
        all.push_back(std::move(mine.changes));
      });
    }
    for (const Named& run : all) {
      for (const auto& [name, tensor] : all[0]) EXPECT_TRUE(tensor.equal(run.at(name))) << name;
    }
  }
}

TEST(ContextRanks, ACriticEqualsOneProcess) {
  Batch batch = testing::batch_of_five();
  for (const at::Tensor& advantage : batch.advantage) {
    batch.value.push_back(at::full_like(advantage, 0.1));
    batch.returns.push_back(advantage);
  }
  const auto gradients = [&](const Form& form, Groups& groups) {
    Config config = config_of({}, form);
    config.critic.ppo_max_token_len_per_gpu = 24;
    models::LoadOptions options{{.dtype = at::kDouble}, true};
    options.head = models::HeadKind::kValue;
    const auto model = models::random_model(testing::tiny_config_json(), 5, options);
    Layout layout{true, {}};
    set_ranks(config, groups, layout);
    const auto optimizer = make_optimizer(config.critic.optim, *model, groups);
    const CriticUpdate update =
        accumulate_value_gradients(config, batch, all_of(batch).samples, layout, *model);
    optimizer->reduce_gradients();
    return std::pair{update.loss, optimizer->grad_norm()};
  };
  Groups one_process;
  const auto [loss, norm] = gradients({.mesh = {}}, one_process);
  for (const ContextKind kind : {kRanges, kHeads}) {
    testing::run_mesh(4, {.cp = 2}, [&, loss = loss, norm = norm](Groups& groups) {
      const auto [own_loss, own_norm] = gradients({.kind = kind}, groups);
      EXPECT_NEAR(own_loss, loss, 1e-10);
      EXPECT_NEAR(own_norm / norm, 1.0, 1e-10);
    });
  }
}

// The bytes of one mini-batch in one block or round, by the formulas of context_parallel.h and
// ulysses.h, and the figures of its walk.
TEST(ContextRanks, BytesSentAreThoseOfTheFormulas) {
  const Case with{.budget = 4096};
  const Batch batch = testing::batch_of_five();
  constexpr int64_t kLayers = 2, kQueries = 4, kKeys = 2, kHead = 16, kBytes = 8;
  constexpr int64_t kFigures = 8 + 8 + 4 * 8;
  for (const int64_t n : {2, 4}) {
    for (const ContextKind kind : {kRanges, kHeads}) {
      const Form form{.size = n, .mesh = {.cp = n}, .kind = kind};
      testing::run_mesh(n, form.mesh, [&](Groups& groups) {
        const Config config = config_of(with, form);
        const auto model = models::random_model(with.model, 3, {{.dtype = with.dtype}, true});
        Layout layout{true, {}};
        set_ranks(config, groups, layout);
        const trie::PlanOptions options =
            plan_options(config.sharing, layout, block_limits(config.actor), true);
        const trie::Plan plan = plan_of(samples_of(batch, all_of(batch).samples), options, layout);
        accumulate_gradients(config, batch, all_of(batch), layout, *model);
        int64_t edges = 0, rows = 0, offered = 0;  // most of a rank
        int64_t sent = 0;                          // by all_to_all
        const int64_t rank = groups.context.rank();
        if (kind == kRanges) {
          ASSERT_EQ(static_cast<int64_t>(plan.blocks.size()), n);
          for (const trie::Block& block : plan.blocks) {
            edges = std::max<int64_t>(edges, block.edges.token.size());
            rows = std::max<int64_t>(rows, block.edges.source.size());
            offered = std::max<int64_t>(offered, block.offered.size());
          }
          sent = kLayers * 2 * offered * kKeys * kHead * kBytes * (n - 1);
        } else {
          ASSERT_EQ(plan.blocks.size(), 1U);
          const BlockShares shares = shares_of(plan.blocks[0], n);
          for (int64_t r = 0; r < n; ++r) {
            edges = std::max(edges, shares.edge[r + 1] - shares.edge[r]);
            rows = std::max(rows, shares.row[r + 1] - shares.row[r]);
          }
          const int64_t own = shares.token[rank + 1] - shares.token[rank];
          const int64_t others = plan.num_unique - own;
          const int64_t h = kQueries / n, k = std::max<int64_t>(kKeys / n, 1);
          const int64_t forward =
              own * (n - 1) * (h + 2 * k) * kHead + others * h * kHead + others * h;
          const int64_t backward = own * (n - 1) * (3 * h + 2 * k) * kHead + own * (n - 1) * h +
                                   others * (h + 2 * k) * kHead;
          sent = kLayers * (forward + backward) * kBytes;
        }
        const int64_t told =
            kind == kRanges ? kLayers * 2 * offered * kKeys * kHead * kBytes * (n - 1) : 0;
        const auto& traffic = groups.context.traffic();
        EXPECT_EQ(traffic.at("all_to_all").bytes, sent) << n;
        EXPECT_EQ(traffic.at("all_gather").bytes, told + ((edges + rows) * 8 + kFigures) * (n - 1))
            << n;
      });
    }
  }
}

TEST(ContextRanks, KeysThatDoNotGoTogetherAreRefused) {
  const auto refusal = [](const std::function<void(Config&)>& change) {
    Config config = testing::tiny_config("", "");
    change(config);
    return testing::parallel_refusal(config);
  };
  EXPECT_EQ(refusal([](Config&) {}), "");
  const auto expect = [&](const std::function<void(Config&)>& change, const std::string& text) {
    EXPECT_NE(refusal(change).find(text), std::string::npos) << refusal(change);
  };
  const std::string ranges = "actor_rollout_ref.actor.megatron.context_parallel_size";
  const std::string heads = "actor_rollout_ref.actor.ulysses_sequence_parallel_size";
  expect(
      [](Config& config) {
        config.actor.megatron.context_parallel_size = 2;
        config.actor.ulysses_sequence_parallel_size = 2;
      },
      "[config] " + heads + ": wanted 1 with " + ranges + "=2, got 2");
  expect([](Config& config) { config.actor.megatron.context_parallel_size = 2; },
         "[config] actor_rollout_ref.ref.megatron.context_parallel_size: wanted the actor's (2), "
         "got 1");
  expect(
      [](Config& config) {
        config.actor.ulysses_sequence_parallel_size = 2;
        config.ref_ulysses_sequence_parallel_size = 2;
      },
      "[config] " + heads + ": wanted a divisor of the number of processes (1)");
}

}  // namespace banyan::train
