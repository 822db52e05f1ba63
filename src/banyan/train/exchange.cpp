#include "banyan/train/exchange.h"

#include <algorithm>
#include <utility>

#include "banyan/train/rollout_wire.h"
#include "banyan/train/spread.h"

namespace banyan::train {

namespace {

std::string to_wire(const RolloutResult& result) {
  WireWriter out;
  out(result, result.unfinished.empty() ? std::string() : to_json(result.unfinished));
  return out.bytes();
}

RolloutResult rollout_from(WireReader in) {
  auto result = in.next<RolloutResult>();
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

RolloutWork share_of(RolloutWork work, int64_t share, int64_t num_shares) {
  if (num_shares == 1) return work;
  const auto is_own = [&](int64_t group) { return group % num_shares == share; };
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
    add_new(in.next<std::vector<std::string>>(), all.warnings);
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

void merge_walk(WalkStats& stats, parallel::Collectives& ranks) {
  WireWriter out;
  out.put(std::vector<int64_t>{stats.num_recomputed,
                               stats.peak_live_tokens,
                               stats.peak_activation_bytes,
                               stats.peak_carry_bytes});
  stats.num_recomputed = 0;
  for (const std::string& bytes : ranks.all_gather_bytes(out.bytes())) {
    const auto of_rank = WireReader(bytes).next<std::vector<int64_t>>();
    stats.num_recomputed += of_rank.at(0);
    stats.peak_live_tokens = std::max(stats.peak_live_tokens, of_rank.at(1));
    stats.peak_activation_bytes = std::max(stats.peak_activation_bytes, of_rank.at(2));
    stats.peak_carry_bytes = std::max(stats.peak_carry_bytes, of_rank.at(3));
  }
}

void merge_peaks(WalkStats& stats, parallel::Collectives& stages) {
  for (int64_t* peak :
       {&stats.peak_live_tokens, &stats.peak_activation_bytes, &stats.peak_carry_bytes}) {
    const std::vector<double> all = stages.all_gather_number(static_cast<double>(*peak));
    *peak = static_cast<int64_t>(*std::max_element(all.begin(), all.end()));
  }
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
