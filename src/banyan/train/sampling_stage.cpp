#include "banyan/train/sampling_stage.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "banyan/algo/group_filter.h"
#include "banyan/core/error.h"
#include "banyan/train/rollout_dump.h"
#include "banyan/train/trainer_mode.h"

namespace banyan::train {
namespace {

// Why too many scores failed to learn from them, or "".
std::string too_many_failed(const Config& config, const std::vector<Score>& scores) {
  int64_t failed = 0;
  std::string reason;
  for (const Score& score : scores) {
    if (!score.failed) continue;
    ++failed;
    reason = score.reason;
  }
  const double allowed = config.max_failed_frac * static_cast<double>(scores.size());
  if (static_cast<double>(failed) <= allowed) return "";
  return detail::concat("[reward] ",
                        failed,
                        " of ",
                        scores.size(),
                        " scores failed, more than banyan.reward.max_failed_frac=",
                        config.max_failed_frac,
                        " allows; the last reason: ",
                        reason);
}

// The number that must differ inside a group, of one valid sample.
double filter_metric(const std::string& name, const Score& score) {
  if (name == "reward" || name == "score" || name == "seq_reward" || name == "seq_final_reward") {
    return score.value;
  }
  const double* entry = find_entry(score, name);
  if (entry != nullptr) return *entry;
  std::string known = "reward";
  for (const auto& [key, value] : score.extra) known += ", " + key;
  BANYAN_CHECK(false,
               "[algorithm.filter_groups.metric] wanted one of ",
               known,
               " (what the reward function returns), got ",
               name);
  return 0.0;
}

// Rows of `batch` that teach nothing.
std::set<int64_t> flat_rows(const FilterGroupsConfig& filter, const Batch& batch) {
  std::vector<int64_t> group;
  std::vector<double> metric;
  const std::string name = filter.metric.value_or("reward");
  for (int64_t i = 0; i < batch.size(); ++i) {
    group.push_back(batch.trajectories[i].row);
    metric.push_back(batch.valid(i) ? filter_metric(name, batch.scores[i]) : 0.0);
  }
  const std::vector<int64_t> flat = algo::flat_groups(group, batch.validity(), metric);
  return {flat.begin(), flat.end()};
}

class Sampling {
 public:
  Sampling(const Generation& with, int64_t step, std::vector<UnfinishedGroup>& unfinished)
      : with_(with),
        filter_(with.config.algorithm.filter_groups),
        step_(step),
        unfinished_(unfinished) {
    needs_greedy_ = algo::advantage(with.config.algorithm.adv_estimator).needs_greedy;
  }

  SampledBatch run() {
    const int64_t wanted = with_.config.train_batch_size;
    RolloutWork work;
    work.resumed = std::exchange(unfinished_, {});
    for (const UnfinishedGroup& group : work.resumed) {
      seen_.insert(group.row.row);
      out_.over_sample.resumed_responses += static_cast<int64_t>(group.cut.size());
    }
    int64_t fetch = started(wanted) - work.num_groups();
    while (kept_rows_.size() < static_cast<size_t>(wanted)) {
      const int64_t missing = wanted - static_cast<int64_t>(kept_rows_.size());
      if (fetch > 0) {
        work.rows = with_.host.next_prompts(fetch);
        const bool ends = static_cast<int64_t>(work.rows.size()) < fetch;
        out_.end_of_data = ends && work.num_groups() < missing;
        if (out_.end_of_data) return std::move(out_);
      }
      if (drops_seen() && drop_seen(work.rows) && work.resumed.empty()) continue;
      out_.refused = refuse_to_go_on(work);
      if (out_.refused.empty()) out_.refused = add(std::exchange(work, {}));
      if (!out_.refused.empty()) return std::move(out_);
      const int64_t still = wanted - static_cast<int64_t>(kept_rows_.size());
      fetch = filter_.enable ? std::min(2 * still, wanted) : still;
      fetch = std::min(started(fetch), with_.config.num_train_rows);
    }
    finish();
    return std::move(out_);
  }

 private:
  double rate() const { return with_.config.rollout.over_sample_rate; }
  // Prompts to start so that `wanted` groups are whole when the rollout ends.
  int64_t started(int64_t wanted) const {
    if (rate() == 0.0) return wanted;
    const double count = std::ceil(static_cast<double>(wanted) / (1.0 - rate()) - 1e-9);
    return std::max(wanted, std::min(static_cast<int64_t>(count), with_.config.num_train_rows));
  }
  // Groups after which a rollout of `work` ends; 0: all.
  int64_t enough(const RolloutWork& work, int64_t missing) const {
    if (rate() == 0.0) return 0;
    const auto share =
        static_cast<int64_t>((1.0 - rate()) * static_cast<double>(work.num_groups()));
    return std::min(work.num_groups(), std::max({share, missing, int64_t{1}}));
  }
  // A row may come again within a step.
  bool drops_seen() const { return filter_.enable || rate() > 0.0; }

  // Takes rows that came before out of `rows`. True if none is left although others may still come:
  // behind the end of an epoch the next one brings this step's rows again. Two epochs bring all.
  bool drop_seen(std::vector<PromptRow>& rows) {
    num_drawn_ += static_cast<int64_t>(rows.size());
    std::erase_if(rows, [&](const PromptRow& row) { return !seen_.insert(row.row).second; });
    const int64_t all = with_.config.num_train_rows;
    return rows.empty() && static_cast<int64_t>(seen_.size()) < all && num_drawn_ < 3 * all;
  }

  // Why the step cannot be filled, or "".
  std::string refuse_to_go_on(const RolloutWork& work) const {
    const bool empty = work.num_groups() == 0;
    if (!filter_.enable) {
      return empty ? "[rollout.over_sample_rate] wanted more training rows than were cut off" : "";
    }
    const int64_t limit = filter_.max_num_gen_batches;
    const int64_t done = out_.filter.num_gen_batches;
    if (!empty && (limit == 0 || done < limit)) return "";
    return detail::concat(
        "[algorithm.filter_groups] ",
        kept_rows_.size(),
        " of ",
        with_.config.train_batch_size,
        " groups differ in ",
        filter_.metric.value_or("reward"),
        " after ",
        done,
        " rollouts",
        empty ? ", and every training row was tried" : " (max_num_gen_batches)",
        "; wanted problems that are neither too easy nor too hard, a higher temperature, a larger "
        "rollout.n or a smaller data.train_batch_size");
  }

  // Rolls `work` out and keeps the groups that differ; why the samples cannot be used, or "".
  std::string add(RolloutWork work) {
    const int64_t wanted = with_.config.train_batch_size;
    work.enough = enough(work, wanted - static_cast<int64_t>(kept_rows_.size()));
    std::vector<PromptRow> rows;
    for (const UnfinishedGroup& group : work.resumed) rows.push_back(group.row);
    rows.insert(rows.end(), work.rows.begin(), work.rows.end());
    if (needs_greedy_) add_greedy(rows);
    RolloutResult result = run_rollout(with_, std::move(work), RolloutKind::kTrain, step_);
    note(result);
    ++out_.filter.num_gen_batches;
    for (UnfinishedGroup& group : std::exchange(result.unfinished, {})) {
      ++out_.over_sample.cut_groups;
      std::erase_if(rows, [&](const PromptRow& row) { return row.row == group.row.row; });
      if (with_.config.partial_rollout) keep(std::move(group));
    }
    const std::string refused = too_many_failed(with_.config, result.scores);
    std::vector<int64_t> order;
    for (const PromptRow& row : rows) order.push_back(row.row);
    std::set<int64_t> flat;
    if (refused.empty() && filter_.enable) {
      flat = flat_rows(filter_, make_batch(result.trajectories, result.scores, order));
    }
    drop(flat, result);
    std::erase_if(order, [&](int64_t row) { return flat.contains(row); });
    kept_rows_.insert(kept_rows_.end(), order.begin(), order.end());
    append(std::move(result), out_.rollout);
    return refused;
  }

  // A group goes on in the next step, under its weights, unless it would come from too many then.
  void keep(UnfinishedGroup group) {
    const int64_t next = std::max<int64_t>(0, step_ - batches_ahead(with_.config));
    int64_t first = next;
    for (const std::vector<Trajectory>* part : {&group.ended, &group.cut}) {
      for (const Trajectory& trajectory : *part) {
        if (const auto versions = weight_versions(trajectory)) {
          first = std::min(first, versions->first);
        }
      }
    }
    if (next - first + 1 <= with_.config.max_off_policy_threshold) {
      unfinished_.push_back(std::move(group));
    } else {
      out_.over_sample.evicted_samples +=
          static_cast<int64_t>(group.ended.size() + group.cut.size());
    }
  }

  void add_greedy(const std::vector<PromptRow>& rows) {
    RolloutResult result = run_rollout(with_, {.rows = rows}, RolloutKind::kGreedy, step_);
    note(result);
    for (const Score& score : result.scores) greedy_[score.row] = score;
    result.trajectories.clear();
    result.scores.clear();
    append(std::move(result), out_.rollout);
  }

  // For the step's file (train/rollout_dump.h), which the first rank writes.
  void note(const RolloutResult& result) {
    const bool is_first = with_.ranks == nullptr || with_.ranks->is_first();
    if (!is_first || !has_rollout_dump(with_.config, step_)) return;
    drawn_.insert(drawn_.end(), result.trajectories.begin(), result.trajectories.end());
  }

  void drop(const std::set<int64_t>& rows, RolloutResult& result) {
    out_.filter.evicted_samples += static_cast<int64_t>(std::erase_if(
        result.trajectories, [&](const Trajectory& t) { return rows.contains(t.row); }));
    std::erase_if(result.scores, [&](const Score& score) { return rows.contains(score.row); });
  }

  void finish() {
    if (!drawn_.empty()) keep_rollout(with_.config, step_, drawn_);
    const auto wanted = static_cast<size_t>(with_.config.train_batch_size);
    std::set<int64_t> surplus(kept_rows_.begin() + static_cast<int64_t>(wanted), kept_rows_.end());
    kept_rows_.resize(wanted);
    out_.filter.surplus_samples = static_cast<int64_t>(std::erase_if(
        out_.rollout.trajectories, [&](const Trajectory& t) { return surplus.contains(t.row); }));
    out_.batch = make_batch(std::move(out_.rollout.trajectories), out_.rollout.scores, kept_rows_);
    if (!needs_greedy_) return;
    for (int64_t i = 0; i < out_.batch.size(); ++i) {
      const Score& baseline = greedy_.at(out_.batch.trajectories[i].row);
      out_.batch.greedy_score.push_back(baseline.value);
      if (!baseline.failed || out_.batch.scores[i].failed) continue;
      out_.batch.scores[i].failed = true;
      out_.batch.scores[i].reason = "no score of the greedy baseline: " + baseline.reason;
    }
  }

  const Generation& with_;
  const FilterGroupsConfig& filter_;
  int64_t step_;
  std::vector<UnfinishedGroup>& unfinished_;
  bool needs_greedy_ = false;
  std::set<int64_t> seen_;
  int64_t num_drawn_ = 0;  // rows, with those that came again
  std::vector<int64_t> kept_rows_;
  std::map<int64_t, Score> greedy_;  // by row
  std::vector<Trajectory> drawn_;    // of all rollouts of the step, where they are kept
  SampledBatch out_;
};

}  // namespace

SampledBatch sample_batch(const Generation& with,
                          int64_t step,
                          std::vector<UnfinishedGroup>& unfinished) {
  return Sampling(with, step, unfinished).run();
}

}  // namespace banyan::train
