#include "banyan/train/exchange.h"

#include <algorithm>
#include <utility>

#include "banyan/train/spread.h"
#include "banyan/train/wire.h"

namespace banyan::train {
namespace {

void put(const Trajectory& t, WireWriter& out) {
  out.put(t.row);
  out.put(t.index);
  out.put(t.prompt);
  out.put(t.response);
  out.put(t.response_mask);
  out.put(t.rollout_log_probs);
  out.put(t.sampled_log_probs);
  out.put(static_cast<int8_t>(t.reward_model_score.has_value()));
  out.put(t.reward_model_score.value_or(0.0));
  out.put(t.finish);
  out.put(static_cast<int64_t>(t.weight_spans.size()));
  for (const WeightSpan& span : t.weight_spans) {
    out.put(span.epoch);
    out.put(span.version);
    out.put(span.start);
    out.put(span.end);
  }
}

Trajectory trajectory_from(WireReader& in) {
  Trajectory t;
  in.get(t.row);
  in.get(t.index);
  in.get(t.prompt);
  in.get(t.response);
  in.get(t.response_mask);
  in.get(t.rollout_log_probs);
  in.get(t.sampled_log_probs);
  const bool has_score = in.next<int8_t>() != 0;
  const auto score = in.next<double>();
  if (has_score) t.reward_model_score = score;
  in.get(t.finish);
  const auto num_spans = in.next<int64_t>();
  for (int64_t i = 0; i < num_spans; ++i) {
    WeightSpan span;
    in.get(span.epoch);
    in.get(span.version);
    in.get(span.start);
    in.get(span.end);
    t.weight_spans.push_back(std::move(span));
  }
  return t;
}

void put(const Score& score, WireWriter& out) {
  out.put(score.row);
  out.put(score.index);
  out.put(static_cast<int8_t>(score.failed));
  out.put(score.reason);
  out.put(score.value);
  out.put(static_cast<int64_t>(score.extra.size()));
  for (const auto& [name, value] : score.extra) {
    out.put(name);
    out.put(value);
  }
  out.put(static_cast<int64_t>(score.texts.size()));
  for (const auto& [name, text] : score.texts) {
    out.put(name);
    out.put(text);
  }
}

Score score_from(WireReader& in) {
  Score score;
  in.get(score.row);
  in.get(score.index);
  score.failed = in.next<int8_t>() != 0;
  in.get(score.reason);
  in.get(score.value);
  const auto num_numbers = in.next<int64_t>();
  for (int64_t i = 0; i < num_numbers; ++i) {
    auto name = in.next<std::string>();
    score.extra.emplace_back(std::move(name), in.next<double>());
  }
  const auto num_texts = in.next<int64_t>();
  for (int64_t i = 0; i < num_texts; ++i) {
    auto name = in.next<std::string>();
    score.texts.emplace_back(std::move(name), in.next<std::string>());
  }
  return score;
}

std::string to_wire(const RolloutResult& result) {
  WireWriter out;
  out.put(static_cast<int64_t>(result.trajectories.size()));
  for (const Trajectory& trajectory : result.trajectories) put(trajectory, out);
  out.put(static_cast<int64_t>(result.scores.size()));
  for (const Score& score : result.scores) put(score, out);
  out.put(result.stats);
  out.put(result.generate_seconds);
  out.put(result.wait_seconds);
  out.put(result.unfinished.empty() ? std::string() : to_json(result.unfinished));
  return out.bytes();
}

RolloutResult rollout_from(WireReader in) {
  RolloutResult result;
  const auto num_trajectories = in.next<int64_t>();
  for (int64_t i = 0; i < num_trajectories; ++i) {
    result.trajectories.push_back(trajectory_from(in));
  }
  const auto num_scores = in.next<int64_t>();
  for (int64_t i = 0; i < num_scores; ++i) result.scores.push_back(score_from(in));
  in.get(result.stats);
  in.get(result.generate_seconds);
  in.get(result.wait_seconds);
  const auto unfinished = in.next<std::string>();
  if (!unfinished.empty()) result.unfinished = unfinished_from_json(unfinished, "another rank");
  return result;
}

// The figures of an update that add up.
std::vector<double*> sums_of(UpdateResult& r) {
  return {&r.loss.loss,
          &r.loss.pg_loss,
          &r.loss.kl_loss,
          &r.loss.entropy_loss,
          &r.loss.clipped_tokens,
          &r.loss.clipped_lower_tokens,
          &r.loss.neg_log_ratio_sum,
          &r.loss.entropy_sum};
}

std::vector<int64_t*> counts_of(UpdateResult& r) {
  return {&r.logical_tokens,
          &r.unique_tokens,
          &r.computed_tokens,
          &r.num_blocks,
          &r.walk.num_recomputed,
          &r.walk.num_scored_before};
}

std::vector<int64_t*> peaks_of(UpdateResult& r) {
  return {&r.walk.peak_live_tokens, &r.walk.peak_activation_bytes, &r.walk.peak_carry_bytes};
}

}  // namespace

RolloutWork share_of(RolloutWork work, const parallel::Collectives& ranks) {
  if (ranks.is_alone()) return work;
  const auto is_own = [&](int64_t group) { return group % ranks.size() == ranks.rank(); };
  RolloutWork own;
  int64_t group = 0;
  for (UnfinishedGroup& resumed : work.resumed) {
    if (is_own(group++)) own.resumed.push_back(std::move(resumed));
  }
  for (PromptRow& row : work.rows) {
    if (is_own(group++)) own.rows.push_back(std::move(row));
  }
  if (work.enough > 0) {
    for (int64_t i = 0; i < work.enough; ++i) own.enough += is_own(i) ? 1 : 0;
    own.enough = std::max<int64_t>(own.enough, 1);  // 0 would ask for all
  }
  return own;
}

RolloutResult exchange(RolloutResult own, parallel::Collectives& ranks) {
  if (ranks.is_alone()) return own;
  RolloutResult all;
  for (const std::string& bytes : ranks.all_gather_bytes(to_wire(own))) {
    RolloutResult part = rollout_from(WireReader(bytes));
    part.generate_seconds = std::max(part.generate_seconds, all.generate_seconds);
    part.wait_seconds = std::max(part.wait_seconds, all.wait_seconds);
    part.stats.seconds = std::max(part.stats.seconds, all.stats.seconds);
    all.generate_seconds = all.wait_seconds = all.stats.seconds = 0.0;
    append(std::move(part), all);
  }
  std::stable_sort(all.trajectories.begin(),
                   all.trajectories.end(),
                   [](const Trajectory& a, const Trajectory& b) { return a.row < b.row; });
  std::sort(
      all.unfinished.begin(),
      all.unfinished.end(),
      [](const UnfinishedGroup& a, const UnfinishedGroup& b) { return a.row.row < b.row.row; });
  return all;
}

void merge_update(const std::vector<int64_t>& places,
                  UpdateResult& result,
                  parallel::Collectives& ranks) {
  if (ranks.is_alone()) return;
  WireWriter out;
  for (const double* sum : sums_of(result)) out.put(*sum);
  for (const int64_t* count : counts_of(result)) out.put(*count);
  for (const int64_t* peak : peaks_of(result)) out.put(*peak);
  out.put(result.loss.max_abs_ratio_minus_one);
  put_metrics(result.loss.extra, out);
  out.put(result.warnings);

  UpdateResult all;
  for (const std::string& bytes : ranks.all_gather_bytes(out.bytes())) {
    WireReader in(bytes);
    for (double* sum : sums_of(all)) *sum += in.next<double>();
    all.rank_tokens.push_back(0);
    for (int64_t* count : counts_of(all)) {
      const auto more = in.next<int64_t>();
      if (count == &all.logical_tokens) all.rank_tokens.back() = more;
      *count += more;
    }
    for (int64_t* peak : peaks_of(all)) *peak = std::max(*peak, in.next<int64_t>());
    all.loss.max_abs_ratio_minus_one =
        std::max(all.loss.max_abs_ratio_minus_one, in.next<double>());
    algo::merge(get_metrics(in), all.loss.extra);
    for (std::string& warning : in.next<std::vector<std::string>>()) {
      if (std::find(all.warnings.begin(), all.warnings.end(), warning) == all.warnings.end()) {
        all.warnings.push_back(std::move(warning));
      }
    }
  }
  const int64_t num_samples = static_cast<int64_t>(result.log_prob.size());
  result.log_prob = gather_lists(places, result.log_prob, num_samples, ranks);
  result.loss = std::move(all.loss);
  result.warnings = std::move(all.warnings);
  result.rank_tokens = std::move(all.rank_tokens);
  const std::vector<int64_t*> to = counts_of(result), from = counts_of(all);
  for (size_t i = 0; i < to.size(); ++i) *to[i] = *from[i];
  const std::vector<int64_t*> high = peaks_of(result), highest = peaks_of(all);
  for (size_t i = 0; i < high.size(); ++i) *high[i] = *highest[i];
}

trie::CostModel broadcast(const trie::CostModel& cost, parallel::Collectives& ranks) {
  WireWriter out;
  out.put(cost);
  const std::string bytes = ranks.broadcast_bytes(out.bytes(), 0);
  return WireReader(bytes).next<trie::CostModel>();
}

int64_t of_first(parallel::Collectives& ranks, const std::function<int64_t()>& find) {
  WireWriter out;
  if (ranks.is_first()) out.put(find());
  const std::string bytes = ranks.broadcast_bytes(out.bytes(), 0);
  return WireReader(bytes).next<int64_t>();
}

std::vector<double> sum_numbers(const std::vector<double>& own, parallel::Collectives& ranks) {
  if (ranks.is_alone()) return own;
  WireWriter out;
  out.put(own);
  std::vector<double> sum(own.size(), 0.0);
  for (const std::string& bytes : ranks.all_gather_bytes(out.bytes())) {
    WireReader in(bytes);
    const auto part = in.next<std::vector<double>>();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part.at(i);
  }
  return sum;
}

}  // namespace banyan::train
