// Attention over one packed trie, forward and backward, on ancestor ranges (specification A4).
//
// Forward lies on the *path grid*: key tile j of a query holds path positions [jC, (j+1)C), C =
// kPathTile, gathered from as many packed ranges as it takes; each tile gives (max, sum, O) and
// tiles are merged in ascending j. So the forward bits of a row depend on its path alone. Tiles
// wholly inside a trunk are packed once and read by all branches. Nothing is copied per sample and
// there is no mask tensor. Backward: dK, dV of a token are sums over its subtree in ascending
// packed order, fp32, one writer, no atomics; dQ in a pass of its own.
//
// A block of a plan whose ancestors lie in other blocks has them as the first tokens of its trie
// (ops/carry.h). They are keys only: forward and backward take the block's own tokens, [T -
// num_carried, ...], and the path grid is that of the whole path, so the bits of a row are those of
// the uncut trie (native kernels; plain operators agree to rounding).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "banyan/core/attention_context.h"
#include "banyan/core/device.h"
#include "banyan/core/profile.h"
#include "banyan/ops/carry.h"
#include "banyan/trie/trie.h"

namespace banyan::ops {

// Path positions per key tile; also the tokens of one page of the rollout's KV pool.
inline constexpr int64_t kPathTile = 64;

// Working memory of calls, grow-only: packed tiles of one layer, sums of the backward.
// Contexts that are used one after the other may share it.
struct AttentionMemory;
struct AttentionCall;
std::shared_ptr<AttentionMemory> make_attention_memory();

// The trie and the stores of `carry` must outlive the context. forward writes the K and V of
// offered tokens to their store, once; backward adds to the accumulators of carried tokens and
// reads those of offered ones, so it runs after every block that attends to them. Native for bf16
// on CPU, plain LibTorch operators otherwise. forward and backward throw [trie_attention] on
// tensors of another shape or dtype. One thread at a time uses a context; each call is parallel
// inside.
class TrieAttention final : public AttentionContext {
 public:
  // Throws [carry] as check_carry. Without `memory` it has its own.
  TrieAttention(const trie::Trie& trie,
                const ComputeOptions& options,
                BlockCarry carry = {},
                std::shared_ptr<AttentionMemory> memory = nullptr);
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
  at::Tensor multiplicity() const override;

 private:
  // Without the slot (ops/slots.h).
  at::Tensor own_forward(int64_t layer,
                         const at::Tensor& q,
                         const at::Tensor& k,
                         const at::Tensor& v,
                         double scale,
                         at::Tensor* lse);
  AttentionGradients own_backward(int64_t layer,
                                  const at::Tensor& grad_out,
                                  const at::Tensor& q,
                                  const at::Tensor& k,
                                  const at::Tensor& v,
                                  const at::Tensor& out,
                                  const at::Tensor& lse,
                                  double scale);
  AttentionCall call_of(
      int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);
  profile::Work work(const at::Tensor& q, const at::Tensor& k, bool backward) const;
  void check_inputs(int64_t layer,
                    const at::Tensor& q,
                    const at::Tensor& k,
                    const at::Tensor& v) const;
  AttentionGradients backward_native(int64_t layer,
                                     const at::Tensor& grad_out,
                                     const at::Tensor& q,
                                     const at::Tensor& k,
                                     const at::Tensor& v,
                                     const at::Tensor& out,
                                     const at::Tensor& lse,
                                     double scale);

  struct Index;  // tiles and chunks of the trie, built once and read by every layer
  std::unique_ptr<Index> index_;
  ComputeOptions options_;
  BlockCarry carry_;
  std::shared_ptr<AttentionMemory> memory_;
};

}  // namespace banyan::ops
