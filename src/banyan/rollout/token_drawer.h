// From hidden rows to tokens and their log-probabilities: the head, the sampler, and
// log_softmax(z / T)[token] before any truncation, by the reduction that scoring uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/core/rng.h"
#include "banyan/models/causal_lm.h"
#include "banyan/rollout/sampler.h"

namespace banyan::rollout {

// One token to draw. Its noise is uniform(key, position), position being the token's own.
struct DrawRequest {
  int32_t row = 0;  // of the hidden rows
  NoiseKey key;
  uint64_t position = 0;
};

struct Drawn {
  int32_t token = 0;
  float logprob = 0.0f;   // at T; at T = 1 when greedy
  float log_kept = 0.0f;  // log of the share that top-k and top-p kept: logprob - log_kept is what
                          // the token was drawn by
};

class TokenDrawer {
 public:
  // `model` is borrowed.
  TokenDrawer(models::CausalLM& model, const SamplerOptions& options);

  // requests sorted by row, one or more for each row of hidden [B, E]; fills `drawn` in their
  // order. Throws [rollout] if a row of logits is not finite.
  void draw(const at::Tensor& hidden,
            const std::vector<DrawRequest>& requests,
            std::vector<Drawn>& drawn) const;

 private:
  void draw_rows(const at::Tensor& logits,
                 const DrawRequest* begin,
                 const DrawRequest* end,
                 Drawn* drawn) const;
  void add_logprobs(const at::Tensor& logits,
                    const DrawRequest* begin,
                    const DrawRequest* end,
                    Drawn* drawn) const;

  models::CausalLM& model_;
  SamplerOptions options_;
};

}  // namespace banyan::rollout
