#include "banyan/bench/scaling_bench.h"

#include <functional>

#include "banyan/bench/median.h"
#include "banyan/bench/workload.h"
#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/train/clock.h"
#include "banyan/train/probe.h"

namespace banyan::bench {
namespace {

// Runs `after_planning` behind each plan, inside the measured time.
std::vector<ScalingSide> rounds(int64_t vocab,
                                const ScalingOptions& options,
                                const std::function<void(const trie::Plan&)>& after_planning) {
  BANYAN_CHECK(options.repeats >= 1, "[bench] repeats: wanted at least 1, got ", options.repeats);
  std::vector<std::vector<Sample>> batches;
  for (const std::string& preset : options.presets) {
    batches.push_back(make_workload(preset, static_cast<int32_t>(vocab), options.seed));
  }
  std::vector<ScalingSide> sides(batches.size());
  for (int64_t round = 0; round <= options.repeats; ++round) {
    for (size_t i = 0; i < batches.size(); ++i) {
      train::Clock clock;
      const trie::Plan plan = trie::plan(batches[i], options.plan);
      after_planning(plan);
      const double seconds = clock.lap();
      if (round > 0) sides[i].seconds.push_back(seconds);
      sides[i].logical_tokens = plan.num_logical;
      sides[i].unique_tokens = plan.num_unique;
      sides[i].blocks = static_cast<int64_t>(plan.blocks.size());
    }
  }
  for (ScalingSide& side : sides) side.median = median(side.seconds);
  return sides;
}

}  // namespace

std::vector<ScalingSide> bench_scaling(models::CausalLM& model, const ScalingOptions& options) {
  keep_freed_memory();
  model.params().ensure_grads();
  return rounds(model.shape().vocab, options, [&](const trie::Plan& plan) {
    model.params().zero_grads();
    train::probe_pass(model, plan);
  });
}

std::vector<ScalingSide> bench_planning(int64_t vocab, const ScalingOptions& options) {
  return rounds(vocab, options, [](const trie::Plan&) {});
}

}  // namespace banyan::bench
