// Attention over one packed trie, forward and backward, on ancestor ranges (specification A4).
//
// Forward lies on the *path grid*: key tile j of a query holds path positions [jC, (j+1)C), C =
// kPathTile, gathered from as many packed ranges as it takes; each tile gives (max, sum, O) and
// tiles are merged in ascending j. So the forward bits of a row depend on its path alone. Tiles
// wholly inside a trunk are packed once and read by all branches. Nothing is copied per sample and
// there is no mask tensor. Backward: dK, dV of a token are sums over its subtree in ascending
// packed order, fp32, one writer, no atomics; dQ in a pass of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "banyan/core/attention_context.h"
#include "banyan/core/device.h"
#include "banyan/trie/trie.h"

namespace banyan::ops {

// Path positions per key tile; also the tokens of one page of the rollout's KV pool.
inline constexpr int64_t kPathTile = 64;

// The trie must outlive the context. Native for bf16 on CPU, plain LibTorch operators otherwise.
// forward and backward throw [trie_attention] on tensors of another shape or dtype. One thread at a
// time uses a context; each call is parallel inside.
class TrieAttention final : public AttentionContext {
 public:
  TrieAttention(const trie::Trie& trie, const ComputeOptions& options);
  ~TrieAttention() override;

  at::Tensor forward(int64_t layer,
                     const at::Tensor& q,
                     const at::Tensor& k,
                     const at::Tensor& v,
                     double scale,
                     at::Tensor* lse) override;
  AttentionGradients backward(int64_t layer,
                              const at::Tensor& grad_out,
                              const at::Tensor& q,
                              const at::Tensor& k,
                              const at::Tensor& v,
                              const at::Tensor& out,
                              const at::Tensor& lse,
                              double scale) override;

 private:
  struct Index;  // tiles of the trie and working memory, built once and reused by every layer
  std::unique_ptr<Index> index_;
  ComputeOptions options_;
};

}  // namespace banyan::ops
