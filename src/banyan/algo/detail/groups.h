// What the advantage estimators share: rows gathered to trajectories and groups (T20-T23), rewards
// to go, whitening (T25). All sums run in row order, in fp64.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "banyan/algo/advantage.h"

namespace banyan::algo::detail {

// True for a row that takes part: valid and with at least one masked token (T22).
bool takes_part(const AdvantageInput& input, size_t row);

// One trajectory of a group. With several outputs (rows), the last one stands for it (T23).
struct Member {
  size_t row = 0;            // stands for the trajectory
  std::vector<size_t> rows;  // all that take part
  double reward = 0.0;       // r_i: token rewards of `row`, KL included
  double num_tokens = 0.0;   // masked tokens of all rows
};

std::map<int64_t, std::vector<Member>> groups_of(const AdvantageInput& input);

// Mean of `values`, and their standard deviation with G - 1; is_flat: fewer than two, or all equal,
// so that a relative advantage is exactly 0 (T20, T21).
struct GroupStatistics {
  double mean = 0.0;
  double std = 0.0;
  bool is_flat = true;
};
GroupStatistics statistics(const std::vector<double>& values);
std::vector<double> rewards_of(const std::vector<Member>& group);

// (r - mean) / (std + 1e-6), or r - mean; zeros for a flat group.
std::vector<double> grpo_rule(const std::vector<double>& values, bool norm_by_std);

// [S][n_i] zeros.
PerToken zeros_like_rewards(const AdvantageInput& input);

// An outcome estimator: `rule` gives one number per member of a group; every masked token of the
// member's rows takes it, as advantage and as return.
AdvantageResult outcome(const AdvantageInput& input,
                        const std::function<std::vector<double>(const std::vector<Member>&)>& rule);

// R_t = sum over s >= t of gamma^(s - t) r_s.
PerToken rewards_to_go(const AdvantageInput& input, double gamma);

// (z - mean) / sqrt(var + 1e-8) over all tokens of the rows with include[row], var with K - 1; with
// fewer than two tokens zeros. Other rows become zeros.
void whiten(const std::vector<uint8_t>& include, PerToken& values);
std::vector<uint8_t> rows_that_take_part(const AdvantageInput& input);
// Likewise without the rows of groups of one, which have no relative advantage (T20).
std::vector<uint8_t> rows_with_peers(const AdvantageInput& input);

}  // namespace banyan::algo::detail
