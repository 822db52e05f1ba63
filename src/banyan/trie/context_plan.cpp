#include "banyan/trie/context_plan.h"

#include <algorithm>
#include <numeric>

#include "banyan/core/error.h"

namespace banyan::trie {
namespace {

// A run of packed tokens, and the blocks that it is cut into.
struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t num_blocks = 0;
};

// Appends the cuts inside a run in front of which its blocks end; of nearly equal weight, which up
// to token t is before[t].
void cut_evenly(const std::vector<double>& before, const Run& run, std::vector<int32_t>& cuts) {
  const double whole = before[run.end] - before[run.begin];
  int64_t last = run.begin;
  for (int64_t b = 1; b < run.num_blocks; ++b) {
    const double wanted =
        before[run.begin] + whole * static_cast<double>(b) / static_cast<double>(run.num_blocks);
    const auto found = std::lower_bound(before.begin(), before.end(), wanted) - before.begin();
    // Every block has a token.
    last = std::clamp<int64_t>(found, last + 1, run.end - (run.num_blocks - b));
    cuts.push_back(static_cast<int32_t>(last));
  }
}

std::vector<double> sums_before(const std::vector<double>& weight) {
  std::vector<double> before(weight.size() + 1, 0.0);
  std::partial_sum(weight.begin(), weight.end(), before.begin() + 1);
  return before;
}

int64_t longest(const std::vector<int32_t>& cuts, const Run& run) {
  int64_t most = 0;
  int64_t last = run.begin;
  for (const int32_t cut : cuts) {
    most = std::max<int64_t>(most, cut - last);
    last = cut;
  }
  return std::max(most, run.end - last);
}

// Of the packed trie: by cost if that keeps the blocks within `budget`, else by number of tokens.
std::vector<int32_t> cuts_of(const Trie& trie,
                             const CostModel& cost,
                             const std::vector<Run>& runs,
                             int64_t budget) {
  const int64_t num_tokens = trie.num_tokens();
  std::vector<double> weight(num_tokens);
  for (int64_t t = 0; t < num_tokens; ++t) {
    weight[t] = cost.per_token + cost.per_pair * static_cast<double>(trie.dep[t] + 1);
  }
  const std::vector<double> by_cost = sums_before(weight);
  const std::vector<double> by_number = sums_before(std::vector<double>(num_tokens, 1.0));
  std::vector<int32_t> cuts;
  for (const Run& run : runs) {
    std::vector<int32_t> inside;
    cut_evenly(by_cost, run, inside);
    if (budget > 0 && longest(inside, run) > budget) {
      inside.clear();
      cut_evenly(by_number, run, inside);
    }
    if (run.begin > 0) cuts.push_back(static_cast<int32_t>(run.begin));
    cuts.insert(cuts.end(), inside.begin(), inside.end());
  }
  return cuts;
}

// Rounds in which at most max_samples samples end and that have at most max_tokens tokens (0: any),
// but one a rank.
std::vector<Run> rounds_of(const Trie& trie,
                           int64_t ranks,
                           int64_t max_samples,
                           int64_t max_tokens) {
  const int64_t num_tokens = trie.num_tokens();
  std::vector<int64_t> ends(num_tokens, 0);
  for (const int32_t end : trie.sample_end) ++ends[end];
  std::vector<Run> runs;
  int64_t samples = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const bool is_full = !runs.empty() && t - runs.back().begin >= ranks &&
                         (samples + ends[t] > max_samples ||
                          (max_tokens > 0 && t - runs.back().begin >= max_tokens));
    if (runs.empty() || is_full) {
      runs.push_back({.begin = t});
      samples = 0;
    }
    samples += ends[t];
    runs.back().end = t + 1;
  }
  for (Run& run : runs) run.num_blocks = std::min(ranks, run.end - run.begin);
  return runs;
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
  std::vector<Run> runs;
  if (options.max_samples_per_block > 0) {
    runs = rounds_of(trie, ranks, options.max_samples_per_block, ranks * budget);
  } else {  // rounds cost the same too
    const int64_t a_round = budget == 0 ? num_tokens : ranks * budget;
    const int64_t num_rounds = (num_tokens + a_round - 1) / a_round;
    runs = {{0, num_tokens, std::min(num_rounds * ranks, num_tokens)}};
  }
  int64_t num_blocks = 0;
  for (const Run& run : runs) num_blocks += run.num_blocks;
  const int64_t num_rounds = (num_blocks + ranks - 1) / ranks;
  const bool again = options.for_backward && num_rounds > 1;
  Plan plan = plan_with_cuts(samples,
                             cuts_of(trie, options.cost, runs, budget),
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
