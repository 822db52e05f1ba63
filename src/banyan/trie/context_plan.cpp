#include "banyan/trie/context_plan.h"

#include <algorithm>
#include <numeric>

#include "banyan/core/error.h"

namespace banyan::trie {
namespace {

// Cuts in front of which the blocks end; `weight` [T] is what each token costs.
std::vector<int32_t> even_cuts(const std::vector<double>& weight, int64_t num_blocks) {
  const auto num_tokens = static_cast<int64_t>(weight.size());
  std::vector<double> before(num_tokens + 1, 0.0);
  std::partial_sum(weight.begin(), weight.end(), before.begin() + 1);
  std::vector<int32_t> cuts;
  int64_t last = 0;
  for (int64_t b = 1; b < num_blocks; ++b) {
    const double wanted = before.back() * static_cast<double>(b) / static_cast<double>(num_blocks);
    const auto found = std::lower_bound(before.begin(), before.end(), wanted) - before.begin();
    // Every block has a token.
    last = std::clamp<int64_t>(found, last + 1, num_tokens - (num_blocks - b));
    cuts.push_back(static_cast<int32_t>(last));
  }
  return cuts;
}

int64_t longest(const std::vector<int32_t>& cuts, int64_t num_tokens) {
  int64_t most = 0;
  int64_t last = 0;
  for (const int32_t cut : cuts) {
    most = std::max<int64_t>(most, cut - last);
    last = cut;
  }
  return std::max(most, num_tokens - last);
}

// Of the packed trie: by cost if that keeps the blocks within `budget`, else by number of tokens.
std::vector<int32_t> cuts_of(const Trie& trie,
                             const CostModel& cost,
                             int64_t num_blocks,
                             int64_t budget) {
  const int64_t num_tokens = trie.num_tokens();
  std::vector<double> weight(num_tokens);
  for (int64_t t = 0; t < num_tokens; ++t) {
    weight[t] = cost.per_token + cost.per_pair * static_cast<double>(trie.dep[t] + 1);
  }
  std::vector<int32_t> cuts = even_cuts(weight, num_blocks);
  if (budget == 0 || longest(cuts, num_tokens) <= budget) return cuts;
  return even_cuts(std::vector<double>(num_tokens, 1.0), num_blocks);
}

}  // namespace

Plan context_plan(const std::vector<Sample>& samples, const PlanOptions& options, int64_t ranks) {
  BANYAN_ASSERT(ranks >= 1, "ranks of a context plan: ", ranks);
  Plan whole = plan_with_cuts(samples, {}, CarryPolicy::kRetain, options);
  if (samples.empty()) {
    whole.blocks_per_round = ranks;
    return whole;
  }
  const Trie& trie = whole.blocks[0].trie;
  const int64_t num_tokens = trie.num_tokens();
  const int64_t budget = options.max_tokens_per_block;
  const int64_t a_round = budget == 0 ? num_tokens : ranks * budget;
  const int64_t num_rounds = (num_tokens + a_round - 1) / a_round;
  const int64_t num_blocks = std::min(num_rounds * ranks, num_tokens);
  const bool again = options.for_backward && num_rounds > 1;
  Plan plan = plan_with_cuts(samples,
                             cuts_of(trie, options.cost, num_blocks, budget),
                             again ? CarryPolicy::kRecompute : CarryPolicy::kRetain,
                             options);
  plan.blocks_per_round = ranks;
  plan.entries.clear();
  plan.num_recomputed = 0;
  for (int32_t r = 0; r < num_rounds; ++r) {
    plan.entries.push_back({Action::kForward, r});
    plan.entries.push_back({Action::kLoss, r});
  }
  if (!options.for_backward) return plan;
  for (auto r = static_cast<int32_t>(num_rounds - 1); r >= 0; --r) {
    if (r + 1 < num_rounds) {
      plan.entries.push_back({Action::kRecompute, r});
      for (int64_t b = r * ranks; b < std::min((r + 1) * ranks, num_blocks); ++b) {
        plan.num_recomputed += plan.blocks[b].num_own();
      }
    }
    plan.entries.push_back({Action::kBackward, r});
  }
  return plan;
}

}  // namespace banyan::trie
