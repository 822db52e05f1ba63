// Log-probabilities on the edges of a trie (specification A6, A8): one head row per source token,
// one log-probability per (source -> child token) edge, entropy per row, without a [T, V] tensor of
// logits.
//   z = h Wᵀ (fp32),  l_x = z[token_x] / tau - lse(z / tau),  H = lse - sum softmax(z / tau) z /
//   tau dz = (1/tau) (sum_x g_x onehot(token_x) - G p) - (h_r / tau) p (log p + H),  G = sum_x g_x
// The vocabulary is walked in fixed tiles in ascending order with a running (max, sum), so a row's
// bits depend on the row alone; rollout samples from the same logits and calls the same reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"
#include "banyan/kernels/cpu/head.h"
#include "banyan/ops/linear.h"

namespace banyan::ops {

struct EdgeIndex {
  at::Tensor row_offsets;  // [R + 1] int32
  at::Tensor token;        // [X] int32
  // The head holds a part of the vocabulary, and token -1 is one outside it: its logit counts as 0
  // here, and its gradient reaches the probabilities alone (parallel/cut_head.h).
  bool is_part = false;
};

struct EdgeLogprob {
  at::Tensor logprob;  // [X] fp32 (fp64 for fp64)
  at::Tensor lse;      // [R] of z / tau
  at::Tensor entropy;  // [R], undefined unless asked for
  int64_t kept = 0;    // which forward a HeadMemory holds; 0: none
};

// The probabilities of the last forward that was given it, in bf16, so that the backward of the
// same rows does not multiply hidden and head again: a quarter of the head's work. Where another
// forward came in between, the backward fills it again, so gradients have the same bits either way.
// At most kBytes; logits of rows beyond are recomputed, and those of all rows with an entropy
// gradient. Native kernels only. The forward's results do not depend on it; gradients are rounded
// to bf16 once more than without.
class HeadMemory {
 public:
  static constexpr int64_t kBytes = int64_t{256} << 20;

  // Room for the first of `rows` rows, as a new forward.
  kernels::KeptProbabilities hold(int64_t rows, int64_t vocabulary);
  // What forward number `kept` left, or nothing if another came since.
  kernels::KeptProbabilities held(int64_t kept) const;
  int64_t number() const { return number_; }

 private:
  kernels::Scratch values_;
  kernels::Scratch max_;
  kernels::KeptProbabilities now_;
  int64_t number_ = 0;
};

// hidden [R, E] compute dtype. Throws [edge_logprob] on a token outside the vocabulary or tau <= 0.
EdgeLogprob edge_logprob_forward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 double temperature,
                                 bool with_entropy,
                                 const ComputeOptions& options,
                                 HeadMemory* memory = nullptr);

// grad_logprob [X] and grad_entropy [R] (or undefined) in logprob's dtype -> d(hidden) [R, E]
// compute dtype; grad_head [V, E] fp32 (fp64) += dzᵀ hidden. Without a memory, logits are
// recomputed tile by tile.
at::Tensor edge_logprob_backward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 const EdgeLogprob& forward,
                                 const at::Tensor& grad_logprob,
                                 const at::Tensor& grad_entropy,
                                 double temperature,
                                 at::Tensor& grad_head,
                                 const ComputeOptions& options,
                                 HeadMemory* memory = nullptr);

// Sum over the vocabulary of softmax(z / tau)^2 of each row (algorithms specification: the token
// baselines), [R] in lse's dtype. `lse` [R] is that of edge_logprob_forward. Works on a few rows of
// logits at a time.
at::Tensor sum_squared_probabilities(const at::Tensor& hidden,
                                     const LinearWeight& head,
                                     const at::Tensor& lse,
                                     double temperature,
                                     const ComputeOptions& options);

// Logits [B, V] fp32 (fp64 for fp64) of a few rows, for sampling: the same bits that edge_logprob
// reduces.
at::Tensor head_logits(const at::Tensor& hidden,
                       const LinearWeight& head,
                       const ComputeOptions& options);

// The same into the first B rows of `logits`, which grows where it is too small or undefined; with
// the native kernels its memory is reused from call to call.
void head_logits_into(const at::Tensor& hidden,
                      const LinearWeight& head,
                      const ComputeOptions& options,
                      at::Tensor& logits);

// log_softmax(z / tau)[token] of rows z [B, V] as edge_logprob_forward gives it, bit for bit. token
// [B] int32.
at::Tensor logits_logprob(const at::Tensor& logits,
                          const at::Tensor& token,
                          double temperature,
                          const ComputeOptions& options);

}  // namespace banyan::ops
