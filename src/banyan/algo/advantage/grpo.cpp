// GRPO (Shao et al., "DeepSeekMath", 2024): a_i = (r_i - mean_g) / (std_g + 1e-6), std with G - 1.
// Dr.GRPO (Liu et al., "Understanding R1-Zero-like training", 2025): a_i = r_i - mean_g.
// Statistics in fp64 over the valid members of the group; a group of one and a group of equal
// rewards get exactly 0 (algorithms spec T20, T21).
#include <algorithm>
#include <cmath>
#include <map>

#include "banyan/algo/detail/entries.h"

namespace banyan::algo::detail {
namespace {

constexpr double kStdFloor = 1e-6;

void normalise(const std::vector<size_t>& members,
               const std::vector<double>& reward,
               bool by_std,
               std::vector<double>& advantage) {
  const auto size = static_cast<double>(members.size());
  double sum = 0.0;
  double low = reward[members.front()];
  double high = low;
  for (const size_t i : members) {
    sum += reward[i];
    low = std::min(low, reward[i]);
    high = std::max(high, reward[i]);
  }
  if (members.size() < 2 || low == high) return;
  const double mean = sum / size;
  double squares = 0.0;
  for (const size_t i : members) squares += (reward[i] - mean) * (reward[i] - mean);
  const double divisor = by_std ? std::sqrt(squares / (size - 1.0)) + kStdFloor : 1.0;
  for (const size_t i : members) advantage[i] = (reward[i] - mean) / divisor;
}

}  // namespace

std::vector<double> grpo(const AdvantageInput& input, const AdvantageOptions& options) {
  const size_t size = input.reward.size();
  BANYAN_ASSERT(input.group.size() == size && input.valid.size() == size,
                "grpo: ",
                size,
                " rewards, ",
                input.group.size(),
                " groups, ",
                input.valid.size(),
                " flags");
  std::map<int64_t, std::vector<size_t>> groups;
  for (size_t i = 0; i < size; ++i) {
    if (input.valid[i]) groups[input.group[i]].push_back(i);
  }
  std::vector<double> advantage(size, 0.0);
  for (const auto& [group, members] : groups) {
    normalise(members, input.reward, options.norm_adv_by_std_in_grpo, advantage);
  }
  return advantage;
}

}  // namespace banyan::algo::detail
