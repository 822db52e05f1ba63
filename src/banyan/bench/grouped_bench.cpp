#include "banyan/bench/grouped_bench.h"

#include <algorithm>
#include <map>
#include <random>

#include "banyan/bench/median.h"
#include "banyan/core/error.h"
#include "banyan/rollout/engine.h"
#include "banyan/train/clock.h"

namespace banyan::bench {
namespace {

using Responses = std::map<int32_t, std::vector<int32_t>>;

class Side {
 public:
  Side(models::CausalLM& model, const GroupedBenchOptions& options, bool grouped)
      : options_(options), engine_(model, engine_options(options, grouped)) {
    std::mt19937_64 random(options.seed);
    prompt_.n = options.n;
    for (int64_t i = 0; i < options.trunk_tokens; ++i) {
      const auto vocab = static_cast<uint64_t>(model.shape().vocab);
      prompt_.tokens.push_back(static_cast<int32_t>(random() % vocab));
    }
  }

  double run(int32_t new_tokens) {
    rollout::SamplingParams params;
    params.max_tokens = new_tokens;
    params.ignore_eos = true;
    params.seed = options_.seed;
    responses_.clear();
    train::Clock clock;
    engine_.generate({prompt_}, params, [&](Trajectory&& trajectory) {
      responses_[trajectory.index] = std::move(trajectory.response);
    });
    return clock.lap();
  }

  const Responses& responses() const { return responses_; }

 private:
  static rollout::EngineOptions engine_options(const GroupedBenchOptions& options, bool grouped) {
    rollout::EngineOptions out;
    out.grouped_attention = grouped;
    out.max_num_seqs = options.n;
    return out;
  }

  const GroupedBenchOptions& options_;
  rollout::Engine engine_;
  rollout::Prompt prompt_;
  Responses responses_;
};

void finish(GroupedSide& side, const std::vector<double>& prompts) {
  side.prompt_seconds = median(prompts);
  side.decode_seconds = median(side.seconds) - side.prompt_seconds;
}

}  // namespace

GroupedBenchResult bench_grouped(models::CausalLM& model, const GroupedBenchOptions& options) {
  BANYAN_CHECK(options.new_tokens >= 2 && options.repeats >= 1,
               "[bench] grouped: wanted at least 2 new tokens and 1 repeat, got ",
               options.new_tokens,
               " and ",
               options.repeats);
  Side on(model, options, /*grouped=*/true);
  Side off(model, options, /*grouped=*/false);
  on.run(2);
  off.run(2);
  GroupedBenchResult result;
  std::vector<double> on_prompts;
  std::vector<double> off_prompts;
  for (int64_t i = 0; i < options.repeats; ++i) {
    on_prompts.push_back(on.run(1));
    off_prompts.push_back(off.run(1));
    result.on.seconds.push_back(on.run(options.new_tokens));
    result.off.seconds.push_back(off.run(options.new_tokens));
    BANYAN_CHECK(on.responses() == off.responses(),
                 "[bench] grouped: wanted the same tokens with and without grouped attention, got "
                 "different ones");
  }
  finish(result.on, on_prompts);
  finish(result.off, off_prompts);
  result.ratio = result.off.decode_seconds / result.on.decode_seconds;
  result.whole_ratio = median(result.off.seconds) / median(result.on.seconds);
  return result;
}

}  // namespace banyan::bench
