// top-k and top-p as a cut of one row of logits (rollout specification 3.2). Tokens are ordered by
// logit descending, ties by id ascending; a truncation keeps a prefix of that order, so it is
// described by its last token and a token survives by comparing with it. Torch-free.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace banyan::rollout {

// The last survivor. Default: everything survives.
struct Cut {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t id = std::numeric_limits<int32_t>::max();
};

inline bool survives(const Cut& cut, float logit, int32_t id) {
  return logit > cut.logit || (logit == cut.logit && id <= cut.id);
}

// Working memory, kept between rows.
struct TruncationScratch {
  std::vector<std::pair<float, int32_t>> candidates;
  std::vector<float> tile_max;
  std::vector<double> mass;  // per bucket
};

// Keeps the first k of z [vocab]; k >= 1. O(vocab).
Cut top_k_cut(const float* z, int32_t vocab, int32_t k, TruncationScratch& scratch);

// Keeps the smallest prefix of the survivors of `within` whose share of their softmax(z / T) mass
// reaches top_p, at least one token. `max` is the largest logit, inverse_t = 1 / T. O(vocab) and a
// sort of the few tokens around the cut.
Cut top_p_cut(const float* z,
              int32_t vocab,
              const Cut& within,
              float max,
              float inverse_t,
              double top_p,
              TruncationScratch& scratch);

}  // namespace banyan::rollout
