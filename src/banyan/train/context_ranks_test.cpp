// Context parallel through updates: ranks that compute each pass over their samples together, by
// ranges of tries or by heads, beside other ranks and cuts, give what one process gives. The ranks
// are threads here; tests/distributed runs the same over processes.
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "banyan/parallel/weight_view.h"
#include "banyan/testing/layout_run.h"
#include "banyan/train/critic.h"
#include "banyan/train/sharded_model.h"
#include "banyan/train/update.h"

namespace banyan::train {
namespace {

using parallel::Groups;
using parallel::MeshShape;
using testing::all_of;
using testing::relative;
using Named = std::map<std::string, at::Tensor>;

constexpr ContextKind kRanges = ContextKind::kRanges;
constexpr ContextKind kHeads = ContextKind::kHeads;

struct Case {
  std::string model = testing::tiny_config_json();
  at::ScalarType dtype = at::kDouble;
  bool share = true;
  int64_t num_samples = 15;
  int64_t budget = 24;  // trunks are cut across blocks
  nn::Recompute recompute = {};
  bool with_losses = false;  // of routers
  std::string loss_mode = "vanilla";
  std::optional<int64_t> max_samples = {};
};

// How ranks work together.
struct Form {
  std::string name = "";
  int64_t size = 2;
  MeshShape mesh = {.cp = 2};
  ContextKind kind = kRanges;
  bool fsdp = false;
  Sharding sharding = {};
  bool sequence = false;
};

struct Trained {
  UpdateResult first;
  Named gradients;  // whole, of the first update
  Named changes;    // of the weights over three steps of AdamW
};

Config config_of(const Case& with, const Form& form) {
  Config config = testing::small_blocks();
  config.actor.ppo_max_token_len_per_gpu = with.budget;
  if (with.max_samples) {
    config.actor.ppo_max_token_len_per_gpu.reset();
    config.actor.ppo_micro_batch_size_per_gpu = with.max_samples;
  }
  config.actor.entropy_coeff = 0.01;
  config.actor.optim.clip_grad = 0.5;
  config.actor.optim.weight_decay = 0.01;
  config.actor.policy_loss.loss_mode = with.loss_mode;
  if (with.with_losses) {
    config.actor.router = {
        .moe_aux_loss_coeff = 0.1, .moe_z_loss_coeff = 0.02, .moe_router_dtype = {}};
  }
  (form.kind == kRanges ? config.actor.megatron.context_parallel_size
                        : config.actor.ulysses_sequence_parallel_size) = form.mesh.cp;
  return config;
}

// Every parameter whole, of what lies as the masters do.
void whole_of(models::CausalLM& model,
              parallel::Fsdp* fsdp,
              Groups& groups,
              at::Tensor Param::* which,
              Named& out) {
  std::vector<at::Tensor> own;
  for (const Param& param : model.params().owned().params()) own.push_back(param.*which);
  const auto keep = [&](const std::string& name, const at::Tensor& whole) {
    out[name] = whole.clone();
  };
  if (fsdp == nullptr) {
    parallel::WeightView(model.params(), groups).each_of(own, keep);
    return;
  }
  fsdp->each_of(own, own[0].scalar_type(), [&](const Param& param, const at::Tensor& whole) {
    keep(param.name, whole);
  });
}

Trained three_steps(const Case& with, const Form& form, Groups& groups) {
  const Config config = config_of(with, form);
  models::LoadOptions options{{.dtype = with.dtype}, true};
  set_cut(form.sequence, groups, options);
  const auto model = models::random_model(with.model, 3, options);
  model->set_recompute(with.recompute);
  Sharding sharding = form.sharding;
  sharding.cuts_weights = form.fsdp;
  const auto fsdp = shard_model(sharding, /*with_gradients=*/true, *model, groups);
  const auto optimizer = make_optimizer(config.actor.optim, *model, groups);
  const Batch batch = testing::batch_of_five();
  MiniBatch mini_batch = all_of(batch);
  mini_batch.samples.resize(with.num_samples);
  Layout layout{with.share, {}};
  set_ranks(config, groups, layout);
  Trained out;
  Named before;
  whole_of(*model, fsdp.get(), groups, &Param::master, before);
  if (!fsdp) {
    accumulate_gradients(config, batch, mini_batch, layout, *model);
    whole_of(*model, nullptr, groups, &Param::grad, out.gradients);
  }
  for (int step = 0; step < 3; ++step) {
    UpdateResult result =
        update(config, batch, mini_batch, layout, /*verify=*/false, 1e-3, *model, *optimizer);
    if (step > 0) continue;
    out.first = std::move(result);
    if (fsdp) whole_of(*model, fsdp.get(), groups, &Param::grad, out.gradients);
  }
  whole_of(*model, fsdp.get(), groups, &Param::master, out.changes);
  for (auto& [name, weight] : out.changes) weight = weight.sub(before.at(name));
  return out;
}

Trained alone(const Case& with) {
  Groups groups;
  return three_steps(with, {.mesh = {}}, groups);
}

void expect_near(const Named& a, const Named& b, double bound, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : b) {
    EXPECT_LE(relative(a.at(name), tensor), bound) << what << " " << name;
  }
}

void expect_equals_one(const Case& with, const Form& form, const Trained& one) {
  const bool wide = with.dtype == at::kDouble;
  const double bound = wide ? 1e-10 : 1e-5;
  const std::string what = form.name + (with.share ? ", shared" : ", dense");
  testing::run_mesh(form.size, form.mesh, [&](Groups& groups) {
    const Trained mine = three_steps(with, form, groups);
    EXPECT_LE(std::abs(mine.first.loss.loss - one.first.loss.loss), bound) << what;
    EXPECT_LE(std::abs(mine.first.grad_norm / one.first.grad_norm - 1.0), bound) << what;
    EXPECT_EQ(mine.first.logical_tokens, one.first.logical_tokens) << what;
    EXPECT_NEAR(mine.first.loss.entropy_sum, one.first.loss.entropy_sum, 1e-3) << what;
    expect_near(mine.gradients, one.gradients, bound, what + " gradient");
    expect_near(mine.changes, one.changes, wide ? 1e-6 : 1e-3, what + " change");
    ASSERT_EQ(mine.first.log_prob.size(), one.first.log_prob.size());
    for (size_t k = 0; k < one.first.log_prob.size(); ++k) {
      EXPECT_LE(relative(mine.first.log_prob[k], one.first.log_prob[k]), bound) << what;
    }
    if (one.first.routers) {
      EXPECT_NEAR(mine.first.routers->loss, one.first.routers->loss, bound) << what;
    }
  });
}

nn::Recompute full(int64_t num_layers) {
  return {.method = nn::RecomputeMethod::kUniform, .num_layers = num_layers};
}

}  // namespace

TEST(ContextRanks, UpdatesEqualOneProcess) {
  for (const bool share : {true, false}) {
    const Case with{.share = share};
    const Trained one = alone(with);
    EXPECT_GT(one.first.num_blocks, 2);
    for (const ContextKind kind : {kRanges, kHeads}) {
      const std::string name = kind == kRanges ? "ranges" : "heads";
      expect_equals_one(with, {.name = name, .kind = kind}, one);
      expect_equals_one(with, {.name = name + ", dp 2", .size = 4, .kind = kind}, one);
    }
    expect_equals_one(with, {.name = "three", .size = 3, .mesh = {.cp = 3}}, one);
    // More query heads than key heads on four ranks.
    expect_equals_one(
        with, {.name = "four heads", .size = 4, .mesh = {.cp = 4}, .kind = kHeads}, one);
  }
}

TEST(ContextRanks, InFp32TooAndWithLayersThatRunAgain) {
  for (const bool again : {false, true}) {
    Case with{.dtype = at::kFloat};
    if (again) with.recompute = full(2);
    const Trained one = alone(with);
    for (const ContextKind kind : {kRanges, kHeads}) {
      expect_equals_one(with, {.name = "fp32", .kind = kind}, one);
    }
  }
}

TEST(ContextRanks, BesideTensorParallelRanks) {
  for (const bool share : {true, false}) {
    const Case with{.share = share};
    const Trained one = alone(with);
    for (const bool sequence : {false, true}) {
      for (const ContextKind kind : {kRanges, kHeads}) {
        const std::string name = std::string("tp 2 x cp 2") + (sequence ? ", SP" : "");
        expect_equals_one(with,
                          {.name = name,
                           .size = 4,
                           .mesh = {.tp = 2, .cp = 2},
                           .kind = kind,
                           .sequence = sequence},
                          one);
      }
    }
  }
}

TEST(ContextRanks, WithWeightsInParts) {
  for (const bool share : {true, false}) {
    Case with{.share = share};
    if (share) with.recompute = full(2);
    const Trained one = alone(with);
    for (const ContextKind kind : {kRanges, kHeads}) {
      const std::string name = kind == kRanges ? "fsdp, ranges" : "fsdp, heads";
      expect_equals_one(with, {.name = name, .kind = kind, .fsdp = true}, one);
      const Sharding kept{.reshard_after_forward = false, .forward_prefetch = true};
      expect_equals_one(
          with,
          {.name = name + ", dp 2", .size = 4, .kind = kind, .fsdp = true, .sharding = kept},
          one);
      expect_equals_one(with,
                        {.name = name + ", hybrid",
                         .size = 4,
                         .mesh = {.cp = 2, .shard = 2},
                         .kind = kind,
                         .fsdp = true,
                         .sharding = {.reduce_each_block = false}},
                        one);
    }
  }
}

// Fewer tokens than ranks: some have no block, and take part in what the others do.
TEST(ContextRanks, RanksWithoutATokenTakePart) {
  const Case with{.num_samples = 1};
  const Trained one = alone(with);
  for (const bool fsdp : {false, true}) {
    expect_equals_one(
        with, {.name = "idle ranges", .size = 9, .mesh = {.cp = 9}, .fsdp = fsdp}, one);
  }
  // Four groups of data-parallel ranks for one sample.
  for (const ContextKind kind : {kRanges, kHeads}) {
    expect_equals_one(with, {.name = "idle groups", .size = 8, .kind = kind, .fsdp = true}, one);
  }
}

TEST(ContextRanks, ExpertsAndTheirLossesEqualOneProcess) {
  const Case with{.model = testing::tiny_moe_config_json(), .with_losses = true};
  const Trained one = alone(with);
  for (const ContextKind kind : {kRanges, kHeads}) {
    expect_equals_one(
        with, {.name = "experts, tp 2", .size = 4, .mesh = {.tp = 2, .cp = 2}, .kind = kind}, one);
    for (const bool fsdp : {false, true}) {
      expect_equals_one(with, {.name = "experts", .kind = kind, .fsdp = fsdp}, one);
      expect_equals_one(
          with, {.name = "experts, dp 2", .size = 4, .kind = kind, .fsdp = fsdp}, one);
    }
  }
}

TEST(ContextRanks, ALossOfTheWholeMiniBatchAndLimitsOfSamples) {
  for (const Case& with :
       {Case{.loss_mode = "kl_cov"}, Case{.max_samples = 2}, Case{.max_samples = 1}}) {
    const Trained one = alone(with);
    const int64_t size = with.max_samples ? 2 : 4;
    for (const ContextKind kind : {kRanges, kHeads}) {
      expect_equals_one(with, {.name = "limits", .size = size, .kind = kind}, one);
    }
  }
}

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
