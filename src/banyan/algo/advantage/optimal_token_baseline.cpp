// The optimal token baseline (Li et al., "The optimal token baseline", 2026): at each response
// position the baseline that minimises the variance of the gradient,
//   R_t = sum over s >= t of r_s
//   e_t = 1 - 2 p_t + q_t, p = exp(l_old), q = sum over the vocabulary of p^2; times w_t^2 with
//   weights W_t = sum over s <= t of e_s b_t = sum_i R_it W_it / (sum_i W_it + 1e-8) over the
//   members of the group with a token at t A_t = R_t - b_t
// Beyond the second longest response of its group only the longest has tokens: b = 0 there. The
// length of a response is the position of its last masked token plus one. If all members with a
// token at t have the same R, then b_t is that R exactly (T21). A group of one gets 0 (T20).
// `tir_optimal_token_baseline` is the same over masked tokens counted 0, 1, 2, ..., so that
// observations between turns do not shift the positions.
#include <algorithm>
#include <cmath>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/groups.h"

namespace banyan::algo::detail {
namespace {

constexpr double kWeightFloor = 1e-8;

// Where the tokens of a row stand: response positions, or 0, 1, 2, ...
std::vector<int64_t> positions_of(const AdvantageInput& input, size_t row, bool squeezed) {
  if (!squeezed && !input.position.empty()) return input.position[row];
  std::vector<int64_t> positions(input.token_reward[row].size());
  for (size_t t = 0; t < positions.size(); ++t) positions[t] = static_cast<int64_t>(t);
  return positions;
}

// W_t of one row.
std::vector<double> power_of(const AdvantageInput& input, size_t row) {
  std::vector<double> power;
  double sum = 0.0;
  for (size_t t = 0; t < input.token_reward[row].size(); ++t) {
    double e = 1.0 - 2.0 * std::exp(input.old_log_prob[row][t]) + input.sum_squares[row][t];
    if (!input.weight.empty()) e *= input.weight[row][t] * input.weight[row][t];
    sum += e;
    power.push_back(sum);
  }
  return power;
}

// Sums at one position over the members that have a token there.
struct Position {
  double weighted = 0.0, weight = 0.0;
  double low = 0.0, high = 0.0;
  bool is_new = true;

  void add(double value, double power) {
    low = is_new ? value : std::min(low, value);
    high = is_new ? value : std::max(high, value);
    is_new = false;
    weighted += value * power;
    weight += power;
  }
  double baseline() const { return low == high ? low : weighted / (weight + kWeightFloor); }
};

AdvantageResult token_baseline(const AdvantageInput& input, bool squeezed) {
  AdvantageResult result;
  result.returns = rewards_to_go(input, /*gamma=*/1.0);
  result.advantage = zeros_like_rewards(input);
  for (const auto& [id, group] : groups_of(input)) {
    if (group.size() < 2) continue;
    std::map<int64_t, Position> at;
    std::vector<int64_t> lengths;
    for (const Member& member : group) {
      const std::vector<int64_t> positions = positions_of(input, member.row, squeezed);
      const std::vector<double> power = power_of(input, member.row);
      for (size_t t = 0; t < positions.size(); ++t) {
        at[positions[t]].add(result.returns[member.row][t], power[t]);
      }
      lengths.push_back(positions.back() + 1);
    }
    std::sort(lengths.begin(), lengths.end());
    const int64_t second_length = lengths[lengths.size() - 2];
    for (const Member& member : group) {
      for (const size_t row : member.rows) {
        const std::vector<int64_t> positions = positions_of(input, row, squeezed);
        for (size_t t = 0; t < positions.size(); ++t) {
          const auto found = at.find(positions[t]);
          const bool has_baseline = found != at.end() && positions[t] < second_length;
          const double baseline = has_baseline ? found->second.baseline() : 0.0;
          result.advantage[row][t] = result.returns[row][t] - baseline;
        }
      }
    }
  }
  return result;
}

}  // namespace

AdvantageResult optimal_token_baseline(const AdvantageInput& input, const AdvantageOptions&) {
  return token_baseline(input, /*squeezed=*/false);
}

AdvantageResult tir_optimal_token_baseline(const AdvantageInput& input, const AdvantageOptions&) {
  return token_baseline(input, /*squeezed=*/true);
}

}  // namespace banyan::algo::detail
