// Clip-Cov (Cui et al., "The entropy mechanism of reinforcement learning", 2025): some tokens whose
// advantage and log-probability move together are left out, which keeps the entropy up,
//   cov = (A - mean A)(l - mean l), means over the masked tokens of the mini-batch
// Of the masked tokens with lb < cov < ub that the clipped surrogate leaves alone,
// max(1, int(clip_cov_ratio N)) random ones get loss 0; the others keep the surrogate without dual
// clip. Statistics, quota and choice cover the whole mini-batch; the choice takes the candidates
// with the smallest random numbers keyed by (seed, step, mini-batch, sequence, position) (T17). The
// position counts the masked tokens of the sequence.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <tuple>

#include "banyan/algo/detail/entries.h"
#include "banyan/algo/detail/tokens.h"
#include "banyan/core/rng.h"

namespace banyan::algo::detail {
namespace {

constexpr uint64_t kPurpose = 0x636c69705f636f76;  // "clip_cov": apart from the draws of others

struct Candidate {
  uint64_t draw;
  int64_t sequence, position;  // break ties
  int64_t token;

  bool operator<(const Candidate& other) const {
    return std::tie(draw, sequence, position) <
           std::tie(other.draw, other.sequence, other.position);
  }
};

uint64_t word(const std::array<uint32_t, 4>& words) {
  return uint64_t{words[0]} | (uint64_t{words[1]} << 32);
}

std::vector<Candidate> candidates(const LossTokens& tokens,
                                  const at::Tensor& clipped,
                                  const LossOptions& options) {
  const std::vector<double> cov = covariance(tokens);
  const at::Tensor flags = clipped.contiguous();
  const bool* is_clipped = flags.const_data_ptr<bool>();
  const at::Tensor mask = tokens.mask.contiguous();
  const double* m = mask.const_data_ptr<double>();
  const uint64_t folded = word(philox(options.seed, options.step, options.mini_batch));
  std::vector<Candidate> out;
  for (size_t s = 0; s + 1 < tokens.offsets.size(); ++s) {
    const int64_t sequence = tokens.sequence.empty() ? static_cast<int64_t>(s) : tokens.sequence[s];
    int64_t position = 0;
    for (int64_t u = tokens.offsets[s]; u < tokens.offsets[s + 1]; ++u) {
      if (m[u] == 0.0) continue;
      const int64_t place = position++;
      if (is_clipped[u] || cov[u] <= options.clip_cov_lb || cov[u] >= options.clip_cov_ub) continue;
      const auto words =
          philox(folded ^ kPurpose, static_cast<uint64_t>(sequence), static_cast<uint64_t>(place));
      out.push_back({word(words), sequence, place, u});
    }
  }
  return out;
}

}  // namespace

PolicyLossResult clip_cov_loss(const LossTokens& tokens,
                               const at::Tensor& log_prob,
                               const LossOptions& options) {
  const at::Tensor ratio = safe_exp(log_prob - tokens.old_log_prob);
  const auto [surrogate, clipped] = clipped_surrogate(tokens.advantage, ratio, options);
  std::vector<Candidate> found = candidates(tokens, clipped, options);
  std::sort(found.begin(), found.end());
  const double num_tokens = tokens.mask.sum().item<double>();
  const auto quota = std::max<size_t>(1, static_cast<size_t>(options.clip_cov_ratio * num_tokens));
  std::vector<int64_t> dropped;
  for (size_t k = 0; k < std::min(quota, found.size()); ++k) dropped.push_back(found[k].token);

  PolicyLossResult result;
  result.clipped = indicator(dropped, log_prob.numel());
  result.loss = surrogate * (1.0 - result.clipped);
  return result;
}

}  // namespace banyan::algo::detail
