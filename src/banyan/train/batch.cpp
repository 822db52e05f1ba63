#include "banyan/train/batch.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "banyan/algo/advantage.h"
#include "banyan/algo/reward_kl.h"
#include "banyan/core/error.h"
#include "banyan/core/rng.h"

namespace banyan::train {

int64_t Batch::num_tokens(int64_t i) const {
  const auto& mask = trajectories[i].response_mask;
  return std::count(mask.begin(), mask.end(), uint8_t{1});
}

bool Batch::valid(int64_t i) const { return !scores[i].failed && num_tokens(i) > 0; }

Batch make_batch(std::vector<Trajectory> trajectories,
                 const std::vector<Score>& scores,
                 const std::vector<int64_t>& row_order) {
  std::map<int64_t, int64_t> rank;
  for (size_t i = 0; i < row_order.size(); ++i) rank[row_order[i]] = static_cast<int64_t>(i);
  std::sort(trajectories.begin(), trajectories.end(), [&](const auto& a, const auto& b) {
    return std::pair(rank.at(a.row), a.index) < std::pair(rank.at(b.row), b.index);
  });
  std::map<std::pair<int64_t, int32_t>, const Score*> by_key;
  for (const Score& score : scores) by_key[{score.row, score.index}] = &score;

  Batch batch;
  for (Trajectory& trajectory : trajectories) {
    const auto found = by_key.find({trajectory.row, trajectory.index});
    BANYAN_ASSERT(
        found != by_key.end(), "no score for row ", trajectory.row, " sample ", trajectory.index);
    batch.scores.push_back(*found->second);
    batch.trajectories.push_back(std::move(trajectory));
  }
  return batch;
}

void set_advantages(const AlgorithmConfig& algorithm, Batch& batch) {
  algo::AdvantageInput input;
  std::vector<int64_t> num_tokens;
  for (int64_t i = 0; i < batch.size(); ++i) {
    input.group.push_back(batch.trajectories[i].row);
    input.score.push_back(batch.scores[i].value);
    input.valid.push_back(batch.valid(i) ? 1 : 0);
    num_tokens.push_back(batch.num_tokens(i));
  }
  input.token_reward = algo::token_rewards(input.score, num_tokens);
  algo::AdvantageOptions options;
  options.norm_adv_by_std_in_grpo = algorithm.norm_adv_by_std_in_grpo;
  const algo::AdvantageResult result =
      algo::compute_advantages(algorithm.adv_estimator, input, options);
  batch.advantage.clear();
  batch.returns.clear();
  for (int64_t i = 0; i < batch.size(); ++i) {
    batch.advantage.push_back(at::tensor(result.advantage[i], at::kDouble));
    batch.returns.push_back(at::tensor(result.returns[i], at::kDouble));
  }
}

std::vector<Sample> samples_of(const Batch& batch, const std::vector<int64_t>& which) {
  std::vector<Sample> samples;
  samples.reserve(which.size());
  for (const int64_t i : which) {
    const Trajectory& from = batch.trajectories[i];
    Sample sample;
    sample.uid = i;
    sample.tokens = from.prompt;
    sample.tokens.insert(sample.tokens.end(), from.response.begin(), from.response.end());
    sample.scored.assign(from.prompt.size(), 0);
    sample.scored.insert(sample.scored.end(), from.response_mask.begin(), from.response_mask.end());
    samples.push_back(std::move(sample));
  }
  return samples;
}

trie::PlanOptions plan_options(const SharingConfig& sharing) {
  const std::map<std::string, trie::Carry> carries{{"auto", trie::Carry::kAuto},
                                                   {"retain", trie::Carry::kRetain},
                                                   {"recompute", trie::Carry::kRecompute},
                                                   {"replay", trie::Carry::kReplay}};
  const auto carry = carries.find(sharing.carry);
  BANYAN_CHECK(carry != carries.end(),
               "[config] sharing.carry: wanted auto, retain, recompute or replay, got '",
               sharing.carry,
               "'");
  trie::PlanOptions options;
  options.build.share = sharing.mode != "off";
  options.build.min_prefix_len = static_cast<int32_t>(sharing.min_prefix_len);
  options.build.min_group_size = static_cast<int32_t>(sharing.min_group_size);
  options.carry = carry->second;
  options.max_tokens_per_block = sharing.max_tokens_per_block;
  options.max_path_tokens = sharing.max_path_tokens;
  return options;
}

trie::PlanOptions plan_options(const Config& config) {
  trie::PlanOptions options = plan_options(config.sharing);
  const ActorConfig& actor = config.actor;
  if (actor.ppo_micro_batch_size_per_gpu && !actor.use_dynamic_bsz) {
    options.max_samples_per_block = *actor.ppo_micro_batch_size_per_gpu;
  } else if (options.max_tokens_per_block == 0) {
    options.max_tokens_per_block = actor.ppo_max_token_len_per_gpu;
  }
  return options;
}

std::vector<std::vector<int64_t>> mini_batches(const Config& config,
                                               const Batch& batch,
                                               int64_t step,
                                               int64_t epoch) {
  std::vector<int64_t> order(batch.size());
  std::iota(order.begin(), order.end(), 0);
  if (config.actor.shuffle) {
    // Fisher-Yates; the draw for place i is keyed by (seed, step, epoch, i).
    for (int64_t i = batch.size() - 1; i > 0; --i) {
      const auto words = philox(config.actor.data_loader_seed,
                                static_cast<uint64_t>(i),
                                (static_cast<uint64_t>(step) << 20) ^ static_cast<uint64_t>(epoch));
      const uint64_t draw = uint64_t{words[0]} | (uint64_t{words[1]} << 32);
      std::swap(order[i], order[draw % static_cast<uint64_t>(i + 1)]);
    }
  }
  const int64_t size = config.actor.ppo_mini_batch_size * config.rollout.train.n;
  std::vector<std::vector<int64_t>> out;
  for (size_t begin = 0; begin < order.size(); begin += size) {
    std::vector<int64_t> part;
    for (size_t i = begin; i < std::min(order.size(), begin + size); ++i) {
      if (batch.valid(order[i])) part.push_back(order[i]);
    }
    if (!part.empty()) out.push_back(std::move(part));
  }
  return out;
}

}  // namespace banyan::train
