#include "banyan/train/context_pass.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::train {

ContextPass::ContextPass(const ContextGroup& group,
                         const trie::Plan& plan,
                         const models::CausalLM& model,
                         StoreOf store_of)
    : ranks_(parallel::is_alone(group.ranks) ? nullptr : group.ranks),
      plan_(plan),
      model_(model),
      store_of_(std::move(store_of)),
      num_blocks_(static_cast<int32_t>(plan.blocks.size())) {
  const bool in_rounds = ranks_ != nullptr && group.kind == ContextKind::kRanges;
  if (in_rounds) width_ = static_cast<int32_t>(ranks_->size());
  BANYAN_ASSERT(plan.blocks_per_round == width_,
                "a plan of ",
                plan.blocks_per_round,
                " blocks at one time for ",
                width_);
  if (!by_heads()) return;
  for (const trie::Block& block : plan.blocks) {
    const std::vector<int64_t> bounds = token_bounds(block.num_own(), ranks_->size());
    std::vector<BlockSlice>& slices = slices_.emplace_back();
    for (int64_t r = 0; r < ranks_->size(); ++r) {
      slices.push_back(slice_of(block, bounds[r], bounds[r + 1]));
    }
  }
}

int32_t ContextPass::own(int32_t round) const {
  const int32_t block = begin(round) + (width_ > 1 ? static_cast<int32_t>(ranks_->rank()) : 0);
  return block < end(round) ? block : -1;
}

const trie::Block& ContextPass::part(int32_t block) const {
  return by_heads() ? slices_[block][ranks_->rank()].block : plan_.blocks[block];
}

at::Tensor ContextPass::of_part(int32_t block, const at::Tensor& numbers, bool on_edges) const {
  if (!by_heads() || !numbers.defined()) return numbers;
  const BlockSlice& slice = slices_[block][ranks_->rank()];
  const trie::Edges& edges = slice.block.edges;
  const size_t count = on_edges ? edges.token.size() : edges.source.size();
  return numbers.narrow(
      0, on_edges ? slice.first_edge : slice.first_row, static_cast<int64_t>(count));
}

std::shared_ptr<RoundExchange> ContextPass::exchange_of(int32_t round) const {
  std::vector<RoundExchange::Offer> offers;
  for (int32_t b = begin(round); b < end(round); ++b) {
    RoundExchange::Offer& offer = offers.emplace_back();
    offer.store = store_of_(b);
    for (const int32_t token : plan_.blocks[b].offered) {
      offer.rows.push_back(token - plan_.blocks[b].num_carried);
    }
  }
  return std::make_shared<RoundExchange>(*ranks_, std::move(offers));
}

std::unique_ptr<AttentionContext> ContextPass::around(int32_t round,
                                                      std::unique_ptr<AttentionContext> inner) {
  if (ranks_ == nullptr) return inner;
  if (width_ > 1) return std::make_unique<ContextAttention>(std::move(inner), exchange_of(round));
  return std::make_unique<UlyssesAttention>(
      std::move(inner), *ranks_, token_bounds(plan_.blocks[round].num_own(), ranks_->size()));
}

at::Tensor ContextPass::no_keys() const {
  return at::empty({0, model_.shape().kv_heads, model_.shape().head_dim},
                   at::TensorOptions(model_.options().device).dtype(model_.options().dtype));
}

void ContextPass::idle_forward(int32_t round) {
  const auto exchange = exchange_of(round);
  const at::Tensor keys = no_keys();
  for (int64_t layer = 0; layer < model_.shape().layers; ++layer) exchange->tell(layer, keys, keys);
}

void ContextPass::idle_backward(int32_t round) {
  const auto exchange = exchange_of(round);
  for (int64_t layer = model_.shape().layers - 1; layer >= 0; --layer) {
    at::Tensor dk = no_keys();
    at::Tensor dv = dk;
    exchange->collect(layer, dk, dv);
  }
}

std::vector<at::Tensor> ContextPass::tell(int32_t round,
                                          const at::Tensor& own,
                                          bool on_edges) const {
  const auto count = [&](const trie::Edges& edges) {
    return static_cast<int64_t>(on_edges ? edges.token.size() : edges.source.size());
  };
  std::vector<int64_t> sizes;
  if (by_heads()) {
    for (const BlockSlice& slice : slices_[round]) sizes.push_back(count(slice.block.edges));
  } else {
    for (int32_t b = begin(round); b < end(round); ++b) {
      sizes.push_back(count(plan_.blocks[b].edges));
    }
  }
  std::vector<at::Tensor> all = gather_numbers(own, sizes, *ranks_);
  if (by_heads()) return {at::cat(all, 0)};
  return all;
}

}  // namespace banyan::train
