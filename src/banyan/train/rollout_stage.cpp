#include "banyan/train/rollout_stage.h"

#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "banyan/core/profile.h"
#include "banyan/train/clock.h"
#include "banyan/train/exchange.h"
#include "banyan/train/rollout_dump.h"

namespace banyan::train {
namespace {

rollout::SamplingParams sampling_params(const Config& config, RolloutKind kind, int64_t step) {
  const bool validation = kind == RolloutKind::kValidation;
  const SamplingConfig& sampling = validation ? config.rollout.validation : config.rollout.train;
  rollout::SamplingParams params;
  const bool greedy = kind == RolloutKind::kGreedy || !sampling.do_sample;
  params.temperature = greedy ? 0.0 : sampling.temperature;
  params.top_p = sampling.top_p;
  params.top_k = static_cast<int32_t>(sampling.top_k);
  params.repetition_penalty = config.rollout.repetition_penalty;
  params.max_tokens = static_cast<int32_t>(config.rollout.response_length);
  params.eos_ids = config.stop_ids;
  params.ignore_eos = config.rollout.ignore_eos;
  // Validation noise does not depend on the step, so that two validations differ by the weights
  // alone.
  params.seed = validation ? config.rollout.seed + 1 : config.rollout.seed;
  params.step = validation ? 0 : static_cast<uint64_t>(step);
  return params;
}

int64_t responses_per_prompt(const Config& config, RolloutKind kind) {
  if (kind == RolloutKind::kGreedy) return 1;
  return kind == RolloutKind::kValidation ? config.rollout.validation.n : config.rollout.train.n;
}

template <typename T>
void move_all(std::vector<T>&& from, std::vector<T>& to) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

// A group is scored as a whole.
void drop_scores_of(const std::vector<UnfinishedGroup>& groups, std::vector<Score>& scores) {
  std::set<int64_t> rows;
  for (const UnfinishedGroup& group : groups) rows.insert(group.row.row);
  std::erase_if(scores, [&](const Score& score) { return rows.contains(score.row); });
}

// Sorts what comes out of the generator into groups, and hands to the scorer what ends.
class Collector {
 public:
  Collector(const Generation& with, RolloutWork work, RolloutKind kind)
      : with_(with), kind_(kind), enough_(work.enough) {
    const auto n = static_cast<int32_t>(responses_per_prompt(with.config, kind));
    for (PromptRow& row : work.rows) {
      prompts_.push_back({.row = row.row, .tokens = row.tokens, .n = n});
      Group& group = groups_[row.row];
      group.left = n;
      group.what.row = std::move(row);
    }
    for (UnfinishedGroup& resumed : work.resumed) {
      add_prompts(resumed, prompts_);
      Group& group = groups_[resumed.row.row];
      group.left = static_cast<int32_t>(resumed.cut.size());
      for (Trajectory& cut : resumed.cut) before_[{cut.row, cut.index}] = std::move(cut);
      resumed.cut.clear();
      group.num_earlier = resumed.ended.size();
      group.what = std::move(resumed);
    }
  }

  const std::vector<rollout::Prompt>& prompts() const { return prompts_; }
  bool has_enough() const { return enough_ > 0 && num_whole_ >= enough_; }

  void take(Trajectory&& trajectory) {
    const auto before = before_.find({trajectory.row, trajectory.index});
    if (before != before_.end()) trajectory = joined(before->second, std::move(trajectory));
    Group& group = groups_[trajectory.row];
    if (enough_ > 0 && trajectory.finish == FinishReason::kAbort) {
      group.what.cut.push_back(std::move(trajectory));
      return;
    }
    if (kind_ == RolloutKind::kGreedy) {
      trajectory.index = static_cast<int32_t>(with_.config.rollout.train.n);
    }
    submit(trajectory);
    group.what.ended.push_back(std::move(trajectory));
    if (--group.left > 0) return;
    ++num_whole_;
    for (size_t i = 0; i < group.num_earlier; ++i) submit(group.what.ended[i]);
  }

  // The trajectories of whole groups; the rest is unfinished.
  RolloutResult sorted() {
    RolloutResult result;
    for (auto& [row, group] : groups_) {
      if (group.left > 0) {
        result.unfinished.push_back(std::move(group.what));
      } else {
        move_all(std::move(group.what.ended), result.trajectories);
      }
    }
    return result;
  }

 private:
  struct Group {
    UnfinishedGroup what;
    size_t num_earlier = 0;  // of `ended`, from earlier steps: not handed to the scorer yet
    int32_t left = 0;        // responses that have not ended
  };

  // With a reward model the scorer waits for its numbers.
  void submit(const Trajectory& trajectory) {
    if (with_.reward_model != nullptr || !with_.scores()) return;
    with_.host.submit(trajectory, kind_ == RolloutKind::kValidation);
  }

  const Generation& with_;
  RolloutKind kind_;
  int64_t enough_;
  std::vector<rollout::Prompt> prompts_;
  std::map<int64_t, Group> groups_;                           // by row
  std::map<std::pair<int64_t, int32_t>, Trajectory> before_;  // what resumed responses had
  int64_t num_whole_ = 0;
};

// Of what all ranks generate.
RolloutWork own_share(RolloutWork work, const Generation& with) {
  if (with.ranks == nullptr) return work;
  const int64_t size = with.together != nullptr ? with.together->size() : 1;
  return share_of(std::move(work), with.ranks->rank() / size, with.ranks->size() / size);
}

// All ranks go the same way; one that does not see the file that others do throws as it reads it.
bool is_replayed(const Generation& with, int64_t step) {
  if (!has_rollout_dump(with.config, step)) return false;
  const bool is_kept = is_rollout_kept(with.config, step);
  return with.ranks != nullptr ? with.ranks->any(is_kept) : is_kept;
}

// What the step's file has of these prompts: a greedy response stands behind the sampled ones.
std::vector<rollout::Prompt> kept_prompts(std::vector<rollout::Prompt> prompts,
                                          const Config& config,
                                          RolloutKind kind) {
  if (kind != RolloutKind::kGreedy) return prompts;
  for (rollout::Prompt& prompt : prompts) {
    prompt.first_index = static_cast<int32_t>(config.rollout.train.n);
  }
  return prompts;
}

// All trajectories and scores, of which those that generate together have the same: one tells.
RolloutResult told_to_all(RolloutResult own, const Generation& with) {
  if (with.ranks == nullptr) return own;
  if (!with.scores()) {
    RolloutResult none;
    none.generate_seconds = own.generate_seconds;
    none.wait_seconds = own.wait_seconds;
    own = std::move(none);
  }
  return exchange(std::move(own), *with.ranks);
}

}  // namespace

rollout::EngineOptions engine_options(const Config& config) {
  const RolloutConfig& rollout = config.rollout;
  const EngineConfig& engine = config.engine;
  rollout::EngineOptions options;
  options.max_num_seqs = static_cast<int32_t>(rollout.max_num_seqs);
  options.max_num_batched_tokens = static_cast<int32_t>(rollout.max_num_batched_tokens);
  options.kv_bytes = engine.kv_cache_memory_bytes.value_or(0);
  options.memory_share = rollout.gpu_memory_utilization;
  options.mem_fraction_static = engine.mem_fraction_static.value_or(0.0);
  options.host_kv_bytes = engine.host_kv_bytes;
  options.max_model_len =
      rollout.max_model_len.value_or(config.max_prompt_length + rollout.response_length);
  options.share_prefix = config.sharing.mode != "off" && rollout.enable_prefix_caching;
  options.enable_chunked_prefill = rollout.enable_chunked_prefill;
  options.long_prefill_token_threshold = static_cast<int32_t>(engine.long_prefill_token_threshold);
  options.prefill_schedule_interval = static_cast<int32_t>(engine.prefill_schedule_interval);
  options.watermark = engine.watermark;
  options.schedule_conservativeness = engine.schedule_conservativeness;
  options.policy = rollout.scheduling_policy == "fcfs"       ? rollout::SchedulingPolicy::kFcfs
                   : rollout.scheduling_policy == "priority" ? rollout::SchedulingPolicy::kPriority
                                                             : rollout::SchedulingPolicy::kGroup;
  options.grouped_attention = engine.grouped_attention;
  options.keep_pool = !(rollout.enable_sleep_mode && rollout.free_cache_engine);
  return options;
}

RolloutResult run_rollout(const Generation& with,
                          RolloutWork work,
                          RolloutKind kind,
                          int64_t step) {
  const profile::PhaseScope phase(profile::Phase::kRollout);
  const bool validation = kind == RolloutKind::kValidation;
  Collector collector(with, own_share(std::move(work), with), kind);
  Clock clock;
  rollout::GenerateStats stats;
  const auto take = [&](Trajectory&& trajectory) { collector.take(std::move(trajectory)); };
  if (!validation && is_replayed(with, step)) {
    const auto prompts = kept_prompts(collector.prompts(), with.config, kind);
    replay_rollout(with.config, step, prompts, take, stats);
  } else if (!collector.prompts().empty() || with.shares_experts) {
    // More ranks than prompts leave some without.
    stats = with.generator.generate(
        collector.prompts(), sampling_params(with.config, kind, step), take, [&] {
          return collector.has_enough();
        });
  }
  const double generate_seconds = clock.lap();
  RolloutResult result = collector.sorted();
  result.stats = stats;
  result.generate_seconds = generate_seconds;
  if (with.reward_model != nullptr && with.scores()) {
    with.reward_model->score(validation, with.host, result.trajectories);
    for (const Trajectory& trajectory : result.trajectories) {
      with.host.submit(trajectory, validation);
    }
  }
  if (with.scores()) {
    const profile::Scope timed("wait for scores");
    result.scores = with.host.poll();
  }
  drop_scores_of(result.unfinished, result.scores);
  result.wait_seconds = clock.lap();
  return told_to_all(std::move(result), with);
}

void append(RolloutResult from, RolloutResult& to) {
  move_all(std::move(from.trajectories), to.trajectories);
  move_all(std::move(from.scores), to.scores);
  move_all(std::move(from.unfinished), to.unfinished);
  to.stats.logical_prompt_tokens += from.stats.logical_prompt_tokens;
  to.stats.computed_prompt_tokens += from.stats.computed_prompt_tokens;
  to.stats.response_tokens += from.stats.response_tokens;
  to.stats.num_passes += from.stats.num_passes;
  to.stats.num_preemptions += from.stats.num_preemptions;
  to.stats.seconds += from.stats.seconds;
  to.generate_seconds += from.generate_seconds;
  to.wait_seconds += from.wait_seconds;
}

}  // namespace banyan::train
