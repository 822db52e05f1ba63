// The least time that this machine could take for a rollout, by the roofline of its decode steps:
//
//   t(step) = max((W + KV bytes) / BW, (2 P B + 4 B ctx L Hq d) / F)
//   KV bytes = kappa (sum over groups of p + B r),  kappa = 2 L Hkv d bytes of one number
//
// W bytes of the packed weights, P their numbers (the head once, the embedding's look-up not), B
// sequences, p prompt tokens, r response tokens so far, ctx = p + r; BW and F measured in the same
// run (machine_rates.h). A trunk's keys and values are counted once per group: no engine has to
// read them again for each sibling. Overheads are not counted, and neither are the prompts, whose
// least time stands beside. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace banyan::bench {

struct ModelCost {
  double weight_bytes = 0.0;              // W
  double weight_numbers = 0.0;            // P
  double kv_bytes_per_token = 0.0;        // kappa
  double attention_flops_per_pair = 0.0;  // 4 L Hq d
};

struct RolloutWork {
  std::vector<int64_t> prompt_tokens;  // of each group
  int64_t n = 1;                       // responses of a group
  int64_t new_tokens = 0;              // of a response

  int64_t sequences() const { return static_cast<int64_t>(prompt_tokens.size()) * n; }
};

struct RolloutCost {
  double bytes = 0.0;           // of all decode steps, one per new token
  double flops = 0.0;           // likewise
  double decode_seconds = 0.0;  // sum of t over the steps
  double prompt_seconds = 0.0;  // each prompt once, one pass over the weights for all
};

RolloutCost least_cost(const ModelCost& model,
                       const RolloutWork& work,
                       double flops_per_s,
                       double bytes_per_s);

}  // namespace banyan::bench
