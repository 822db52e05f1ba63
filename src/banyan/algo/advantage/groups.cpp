#include "banyan/algo/detail/groups.h"

#include <algorithm>
#include <cmath>

namespace banyan::algo::detail {
namespace {

constexpr double kStdFloor = 1e-6;
constexpr double kVarianceFloor = 1e-8;

}  // namespace

bool takes_part(const AdvantageInput& input, size_t row) {
  return input.valid[row] != 0 && !input.token_reward[row].empty();
}

std::map<int64_t, std::vector<Member>> groups_of(const AdvantageInput& input) {
  std::map<int64_t, std::vector<Member>> groups;
  std::map<std::pair<int64_t, int64_t>, size_t> place;  // (group, trajectory) -> member
  for (size_t row = 0; row < input.token_reward.size(); ++row) {
    if (!takes_part(input, row)) continue;
    std::vector<Member>& group = groups[input.group[row]];
    const int64_t trajectory =
        input.trajectory.empty() ? static_cast<int64_t>(row) : input.trajectory[row];
    const auto [found, is_new] =
        place.emplace(std::pair(input.group[row], trajectory), group.size());
    if (is_new) group.emplace_back();
    Member& member = group[found->second];
    member.row = row;
    member.rows.push_back(row);
    member.reward = 0.0;
    for (const double reward : input.token_reward[row]) member.reward += reward;
    member.num_tokens += static_cast<double>(input.token_reward[row].size());
  }
  return groups;
}

GroupStatistics statistics(const std::vector<double>& values) {
  GroupStatistics out;
  if (values.empty()) return out;
  const auto size = static_cast<double>(values.size());
  double sum = 0.0;
  for (const double value : values) sum += value;
  out.mean = sum / size;
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  out.is_flat = values.size() < 2 || *low == *high;
  if (out.is_flat) return out;
  double squares = 0.0;
  for (const double value : values) squares += (value - out.mean) * (value - out.mean);
  out.std = std::sqrt(squares / (size - 1.0));
  return out;
}

std::vector<double> rewards_of(const std::vector<Member>& group) {
  std::vector<double> rewards;
  for (const Member& member : group) rewards.push_back(member.reward);
  return rewards;
}

std::vector<double> grpo_rule(const std::vector<double>& values, bool norm_by_std) {
  std::vector<double> out(values.size(), 0.0);
  const GroupStatistics group = statistics(values);
  if (group.is_flat) return out;
  const double divisor = norm_by_std ? group.std + kStdFloor : 1.0;
  for (size_t i = 0; i < values.size(); ++i) out[i] = (values[i] - group.mean) / divisor;
  return out;
}

PerToken zeros_like_rewards(const AdvantageInput& input) {
  PerToken out;
  for (const auto& row : input.token_reward) out.emplace_back(row.size(), 0.0);
  return out;
}

AdvantageResult outcome(
    const AdvantageInput& input,
    const std::function<std::vector<double>(const std::vector<Member>&)>& rule) {
  AdvantageResult result;
  result.advantage = zeros_like_rewards(input);
  for (const auto& [id, group] : groups_of(input)) {
    const std::vector<double> advantage = rule(group);
    for (size_t k = 0; k < group.size(); ++k) {
      for (const size_t row : group[k].rows) {
        std::fill(result.advantage[row].begin(), result.advantage[row].end(), advantage[k]);
      }
    }
  }
  result.returns = result.advantage;
  return result;
}

PerToken rewards_to_go(const AdvantageInput& input, double gamma) {
  PerToken out = zeros_like_rewards(input);
  for (size_t row = 0; row < out.size(); ++row) {
    if (!takes_part(input, row)) continue;
    double sum = 0.0;
    for (size_t t = out[row].size(); t-- > 0;) {
      sum = input.token_reward[row][t] + gamma * sum;
      out[row][t] = sum;
    }
  }
  return out;
}

void whiten(const std::vector<uint8_t>& include, PerToken& values) {
  double count = 0.0, sum = 0.0, squares = 0.0;
  const auto each = [&](const auto& visit) {
    for (size_t row = 0; row < values.size(); ++row) {
      if (!include[row]) continue;
      for (double& value : values[row]) visit(value);
    }
  };
  each([&](double value) {
    count += 1.0;
    sum += value;
  });
  const double mean = count > 0.0 ? sum / count : 0.0;
  each([&](double value) { squares += (value - mean) * (value - mean); });
  const double scale =
      count < 2.0 ? 0.0 : 1.0 / std::sqrt(squares / (count - 1.0) + kVarianceFloor);
  each([&](double& value) { value = (value - mean) * scale; });
  for (size_t row = 0; row < values.size(); ++row) {
    if (!include[row]) std::fill(values[row].begin(), values[row].end(), 0.0);
  }
}

std::vector<uint8_t> rows_that_take_part(const AdvantageInput& input) {
  std::vector<uint8_t> rows;
  for (size_t row = 0; row < input.token_reward.size(); ++row) {
    rows.push_back(takes_part(input, row) ? 1 : 0);
  }
  return rows;
}

std::vector<uint8_t> rows_with_peers(const AdvantageInput& input) {
  std::vector<uint8_t> rows(input.token_reward.size(), 0);
  for (const auto& [id, group] : groups_of(input)) {
    if (group.size() < 2) continue;
    for (const Member& member : group) {
      for (const size_t row : member.rows) rows[row] = 1;
    }
  }
  return rows;
}

}  // namespace banyan::algo::detail
