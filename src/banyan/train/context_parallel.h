// Context parallel over tries: the ranks of a group run the blocks of one round at one time
// (trie/context_plan.h), each its own, and tell each other, layer by layer, the keys and values
// that another block attends to:
//   forward of layer l     offered K, V of every block of the round -> all ranks (all_gather)
//   backward of layer l    sums of dK, dV of the keys that this rank's block offers <- all ranks
// So every rank holds what any block carries, and a block's attention is that of any plan. A plain
// sequence is a trie of one path: the ranks then hold neighbouring parts of equal cost, and the
// all-gather of keys and values is that of Llama 3 (Dubey et al., 2024, section 3.3.2).
//
// Traffic per layer and rank, n ranks, m the most tokens that a block of the round offers:
// 2 m K D (n - 1) numbers of the compute dtype forward, 2 m K D (n - 1) fp32 (fp64) backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/core/device.h"
#include "banyan/ops/carry.h"
#include "banyan/parallel/collectives.h"

namespace banyan::train {

class RoundExchange {
 public:
  // One block of the round. The store is borrowed; `rows` are its offered tokens, counted from its
  // first own one.
  struct Offer {
    ops::CarryStore* store = nullptr;
    std::vector<int32_t> rows;
  };

  // `offers` of all blocks of the round, the i-th of rank i; fewer than ranks in a last round.
  RoundExchange(parallel::Collectives& ranks, std::vector<Offer> offers);

  // (all) Keys and values of what each block offers -> the stores of all ranks, once; `k`, `v`
  // [T, K, D] are the own block's, with T = 0 on a rank without a block.
  void tell(int64_t layer, const at::Tensor& k, const at::Tensor& v);
  // (all) Adds to `dk`, `dv` [T, K, D] of the own block what the stores of all ranks have gathered
  // for its tokens. Rounded once more than in one process where the dtype is narrow.
  void collect(int64_t layer, at::Tensor& dk, at::Tensor& dv);

 private:
  parallel::Collectives& ranks_;
  std::vector<Offer> offers_;
  int64_t most_ = 0;  // tokens that one block offers
};

// The attention of the own block in a round. `inner` carries from the stores and offers nothing.
class ContextAttention final : public AttentionContext {
 public:
  ContextAttention(std::unique_ptr<AttentionContext> inner, std::shared_ptr<RoundExchange> exchange)
      : inner_(std::move(inner)), exchange_(std::move(exchange)) {}

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
  at::Tensor multiplicity() const override { return inner_->multiplicity(); }

 private:
  std::unique_ptr<AttentionContext> inner_;
  std::shared_ptr<RoundExchange> exchange_;
};

// (all) The 1-D fp64 tensors of every rank, of which the i-th has sizes[i] numbers; the own one may
// be undefined where its size is 0.
std::vector<at::Tensor> gather_numbers(const at::Tensor& own,
                                       const std::vector<int64_t>& sizes,
                                       parallel::Collectives& ranks);

}  // namespace banyan::train
