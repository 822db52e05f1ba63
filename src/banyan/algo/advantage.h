// Rewards to advantages (algorithms spec section 6, with banyan's choices T19-T21).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/registry.h"

namespace banyan::algo {

struct AdvantageInput {
  std::vector<int64_t> group;       // [S] group of each trajectory
  std::vector<double> reward;       // [S] sum of its token rewards
  std::vector<int64_t> num_tokens;  // [S] n_i, masked response tokens
  std::vector<uint8_t> valid;  // [S] 0 = left out of its group's statistics (failed scorer); gets 0
};

struct AdvantageOptions {
  bool norm_adv_by_std_in_grpo = true;  // false: Dr.GRPO
};

// One advantage per trajectory, [S]; every masked token of it carries that value.
using Advantage = std::vector<double> (*)(const AdvantageInput&, const AdvantageOptions&);

const Registry<Advantage>& advantages();  // "grpo", ...

}  // namespace banyan::algo
