// AttentionContext: the only thing an attention layer knows about where its keys and values are.
// Training uses the trie of a block (ops/trie_attention.h), rollout the paged pool
// (ops/paged_attention.h). A router also asks it how many samples pass through a token.
#pragma once

#include <ATen/core/Tensor.h>

namespace banyan {

struct AttentionGradients {
  at::Tensor dq;  // [T, H, D]
  at::Tensor dk;  // [T, K, D]
  at::Tensor dv;  // [T, K, D]
};

class AttentionContext {
 public:
  virtual ~AttentionContext() = default;

  // o[T, H, D] = softmax(scale q kᵀ over the ancestors of each token and itself) v.
  // q [T, H, D], k and v [T, K, D] in the compute dtype, after norm and RoPE; query head h reads kv
  // head h / (H / K). `lse` [T, H] fp32 (fp64 for fp64 inputs) is written when it is not null.
  virtual at::Tensor forward(int64_t layer,
                             const at::Tensor& q,
                             const at::Tensor& k,
                             const at::Tensor& v,
                             double scale,
                             at::Tensor* lse) = 0;

  // Gradients of forward for the same tokens; contexts that only infer throw.
  virtual AttentionGradients backward(int64_t layer,
                                      const at::Tensor& grad_out,
                                      const at::Tensor& q,
                                      const at::Tensor& k,
                                      const at::Tensor& v,
                                      const at::Tensor& out,
                                      const at::Tensor& lse,
                                      double scale) = 0;

  // Samples that pass through each token, [T] fp64 on the CPU; undefined where nobody knows.
  virtual at::Tensor multiplicity() const { return {}; }
};

}  // namespace banyan
