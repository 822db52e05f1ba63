#include "banyan/train/context_pass.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/parallel/tensor_parallel.h"

namespace banyan::train {
namespace {

// Unit 0 is what lies outside of layers.
int64_t layer_of(const UnitUse& use) { return use.unit - 1; }

}  // namespace

ContextPass::ContextPass(const ContextGroup& group,
                         const trie::Plan& plan,
                         models::CausalLM& model,
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
    shares_.push_back(shares_of(block, ranks_->size()));
    parts_.push_back(part_of(block, shares_.back(), ranks_->rank()));
  }
}

int32_t ContextPass::own(int32_t round) const {
  const int32_t block = begin(round) + (width_ > 1 ? static_cast<int32_t>(ranks_->rank()) : 0);
  return block < end(round) ? block : -1;
}

const trie::Block& ContextPass::part(int32_t block) const {
  return by_heads() ? parts_[block] : plan_.blocks[block];
}

at::Tensor ContextPass::of_part(int32_t block, const at::Tensor& numbers, bool on_edges) const {
  if (!by_heads() || !numbers.defined()) return numbers;
  const std::vector<int64_t>& bounds = on_edges ? shares_[block].edge : shares_[block].row;
  const int64_t first = bounds[ranks_->rank()];
  return numbers.narrow(0, first, bounds[ranks_->rank() + 1] - first);
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
  return std::make_unique<UlyssesAttention>(std::move(inner), *ranks_, shares_[round]);
}

at::Tensor ContextPass::no_keys() const {
  const parallel::TensorParallel* tensor = model_.tensor();
  const int64_t heads = tensor != nullptr ? tensor->kv_heads().count : model_.shape().kv_heads;
  return at::empty({0, heads, model_.shape().head_dim},
                   at::TensorOptions(model_.options().device).dtype(model_.options().dtype));
}

void ContextPass::idle_forward(int32_t round, int64_t chunk) {
  const auto exchange = exchange_of(round);
  const at::Tensor keys = no_keys();
  for (const UnitUse& use : model_.unit_uses(Pass::kForward, chunk)) {
    model_.params().enter(use.unit);
    exchange->tell(layer_of(use), keys, keys);
    model_.params().leave(use.unit);
  }
}

void ContextPass::idle_backward(int32_t round, int64_t chunk) {
  const auto exchange = exchange_of(round);
  for (const UnitUse& use : model_.unit_uses(Pass::kBackward, chunk)) {
    model_.params().enter(use.unit);
    at::Tensor dk = no_keys();
    at::Tensor dv = dk;
    if (use.backward) exchange->collect(layer_of(use), dk, dv);  // else it only runs again
    model_.params().leave(use.unit);
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
    const std::vector<int64_t>& bounds = on_edges ? shares_[round].edge : shares_[round].row;
    for (int64_t r = 0; r < ranks_->size(); ++r) sizes.push_back(bounds[r + 1] - bounds[r]);
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
