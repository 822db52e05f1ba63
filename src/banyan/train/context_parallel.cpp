#include "banyan/train/context_parallel.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::train {
namespace {

at::Tensor index_of(const std::vector<int32_t>& rows, at::Device device) {
  return at::tensor(rows, at::kLong).to(device);
}

}  // namespace

RoundExchange::RoundExchange(parallel::Collectives& ranks, std::vector<Offer> offers)
    : ranks_(ranks), offers_(std::move(offers)) {
  BANYAN_ASSERT(static_cast<int64_t>(offers_.size()) <= ranks_.size(),
                offers_.size(),
                " blocks in a round of ",
                ranks_.size());
  for (const Offer& offer : offers_) {
    most_ = std::max(most_, static_cast<int64_t>(offer.rows.size()));
  }
}

void RoundExchange::tell(int64_t layer, const at::Tensor& k, const at::Tensor& v) {
  if (most_ == 0) return;
  const bool told = std::any_of(
      offers_.begin(), offers_.end(), [&](const Offer& offer) { return offer.store->has(layer); });
  if (told) return;  // a forward that runs again
  at::Tensor mine = at::zeros({2, most_, k.size(1), k.size(2)}, k.options());
  if (ranks_.rank() < static_cast<int64_t>(offers_.size())) {
    const std::vector<int32_t>& rows = offers_[ranks_.rank()].rows;
    const auto count = static_cast<int64_t>(rows.size());
    const at::Tensor index = index_of(rows, k.device());
    mine[0].narrow(0, 0, count).copy_(k.index_select(0, index));
    mine[1].narrow(0, 0, count).copy_(v.index_select(0, index));
  }
  const at::Tensor all = ranks_.all_gather(mine);  // [n, 2, most, K, D]
  for (size_t i = 0; i < offers_.size(); ++i) {
    const auto count = static_cast<int64_t>(offers_[i].rows.size());
    if (count == 0) continue;
    ops::CarryStore& store = *offers_[i].store;
    if (static_cast<int64_t>(store.k.size()) <= layer) {
      store.k.resize(layer + 1);
      store.v.resize(layer + 1);
    }
    const at::Tensor told_by = all[static_cast<int64_t>(i)];
    store.k[layer] = told_by[0].narrow(0, 0, count).clone();
    store.v[layer] = told_by[1].narrow(0, 0, count).clone();
  }
}

void RoundExchange::collect(int64_t layer, at::Tensor& dk, at::Tensor& dv) {
  if (most_ == 0) return;
  const auto wide = dk.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor sums =
      at::zeros({ranks_.size(), 2, most_, dk.size(1), dk.size(2)}, dk.options().dtype(wide));
  for (size_t i = 0; i < offers_.size(); ++i) {
    const ops::CarryStore& store = *offers_[i].store;
    if (!store.has_gradient(layer)) continue;
    const at::Tensor for_rank = sums[static_cast<int64_t>(i)];
    for_rank[0].narrow(0, 0, store.dk[layer].size(0)).copy_(store.dk[layer]);
    for_rank[1].narrow(0, 0, store.dv[layer].size(0)).copy_(store.dv[layer]);
  }
  const at::Tensor mine =
      ranks_.reduce_scatter_sum(sums.flatten()).view({2, most_, dk.size(1), dk.size(2)});
  if (ranks_.rank() >= static_cast<int64_t>(offers_.size())) return;
  const std::vector<int32_t>& rows = offers_[ranks_.rank()].rows;
  if (rows.empty()) return;
  const at::Tensor index = index_of(rows, dk.device());
  const auto count = static_cast<int64_t>(rows.size());
  const auto add = [&](at::Tensor& to, const at::Tensor& from) {
    to = to.to(wide).index_add(0, index, from.narrow(0, 0, count).to(wide)).to(to.scalar_type());
  };
  add(dk, mine[0]);
  add(dv, mine[1]);
}

at::Tensor ContextAttention::forward(int64_t layer,
                                     const at::Tensor& q,
                                     const at::Tensor& k,
                                     const at::Tensor& v,
                                     double scale,
                                     at::Tensor* lse) {
  exchange_->tell(layer, k, v);
  return inner_->forward(layer, q, k, v, scale, lse);
}

AttentionGradients ContextAttention::backward(int64_t layer,
                                              const at::Tensor& grad_out,
                                              const at::Tensor& q,
                                              const at::Tensor& k,
                                              const at::Tensor& v,
                                              const at::Tensor& out,
                                              const at::Tensor& lse,
                                              double scale) {
  AttentionGradients gradients = inner_->backward(layer, grad_out, q, k, v, out, lse, scale);
  exchange_->collect(layer, gradients.dk, gradients.dv);
  return gradients;
}

std::vector<at::Tensor> gather_numbers(const at::Tensor& own,
                                       const std::vector<int64_t>& sizes,
                                       parallel::Collectives& ranks) {
  const int64_t most = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
  std::vector<at::Tensor> out;
  if (most == 0) return std::vector<at::Tensor>(sizes.size(), at::zeros({0}, at::kDouble));
  at::Tensor mine = at::zeros({most}, at::kDouble);
  if (own.defined()) mine.narrow(0, 0, own.size(0)).copy_(own);
  const at::Tensor all = ranks.all_gather(mine);
  for (size_t i = 0; i < sizes.size(); ++i) {
    out.push_back(all[static_cast<int64_t>(i)].narrow(0, 0, sizes[i]).clone());
  }
  return out;
}

}  // namespace banyan::train
