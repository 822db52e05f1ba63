// From hidden rows to tokens and their log-probabilities (rollout specification 3.2, 8.2): the
// head, then each request by its own parameters. A token depends on its row, its response and its
// noise alone, never on what else is in the batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "banyan/core/rng.h"
#include "banyan/models/causal_lm.h"
#include "banyan/rollout/sampling/response_state.h"
#include "banyan/rollout/sampling/row_sampler.h"

namespace banyan::rollout {

// One token to draw. Its noise is uniform(key, position), position being the token's own.
struct DrawRequest {
  int32_t row = 0;                          // of the hidden rows
  const ResponseState* response = nullptr;  // not changed: append() is the caller's
  NoiseKey key;                             // sampling/noise.h
  uint64_t position = 0;
};

class TokenDrawer {
 public:
  // `model` is borrowed.
  explicit TokenDrawer(models::CausalLM& model);
  ~TokenDrawer();

  // requests sorted by row, one or more for each row of hidden [B, E]; fills `drawn` in their
  // order. A row that cannot be drawn from says so in its status and leaves the others alone.
  // Without with_raw, record.raw is 0 where it would cost a reduction of its own (T other than 1,
  // changed logits).
  void draw(const at::Tensor& hidden,
            const std::vector<DrawRequest>& requests,
            std::vector<Drawn>& drawn,
            bool with_raw = true);

  // Prompt log-probabilities: log_softmax(z) of row r at next[r], T = 1, no masks; out[r] is the
  // token itself, the num_top likeliest and `ids`, as TokenRecord::top. hidden [R, E], next [R].
  void score(const at::Tensor& hidden,
             const std::vector<int32_t>& next,
             int32_t num_top,
             const std::vector<int32_t>& ids,
             std::vector<std::vector<TokenLogprob>>& out);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Text for a status other than kDrawn.
const char* explain(DrawStatus status);

}  // namespace banyan::rollout
