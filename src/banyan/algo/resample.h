// PF-PPO (Shen and Zhang, "Policy filtration", 2024): draws S rows with replacement, the
// probability of row i proportional to 1e-8 + v_i. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace banyan::algo {

struct ResampleOptions {
  std::string reweight_method = "pow";  // algorithm.pf_ppo.reweight_method: pow|max_min|max_random
  double weight_pow = 2.0;              // algorithm.pf_ppo.weight_pow
};

// pow: v = |score|^weight_pow. max_min: v = 1 for rows equal to the batch's maximum or minimum,
// else 0. max_random: v = 0.4 for the maximum, else 0.1. Rows that are not valid are never drawn.
// Returns as many indices as rows are valid; draw k is keyed by (seed, step, k).
std::vector<int64_t> resample(const std::vector<double>& score,
                              const std::vector<uint8_t>& valid,
                              const ResampleOptions& options,
                              uint64_t seed,
                              uint64_t step);
void check_resample_options(const ResampleOptions& options);

}  // namespace banyan::algo
