#include "banyan/train/ulysses.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::train {
namespace {

// Heads [first, first + count) of key heads that a rank's query heads read.
struct KeyHeads {
  int64_t first = 0;
  int64_t count = 0;
};

KeyHeads key_heads(int64_t rank, int64_t ranks, int64_t kv_heads) {
  if (kv_heads % ranks == 0) return {rank * (kv_heads / ranks), kv_heads / ranks};
  return {rank * kv_heads / ranks, 1};
}

// x [t, ...] with rows of zeros behind it: [count, ...].
at::Tensor padded(const at::Tensor& x, int64_t count) {
  if (x.size(0) == count) return x.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = count;
  at::Tensor out = at::zeros(shape, x.options());
  out.narrow(0, 0, x.size(0)).copy_(x);
  return out;
}

}  // namespace

void check_ulysses(const char* key, int64_t ranks, int64_t heads, int64_t kv_heads) {
  BANYAN_CHECK(heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0),
               "[config] ",
               key,
               ": wanted a divisor of the ",
               heads,
               " query heads that divides the ",
               kv_heads,
               " key heads or is a multiple of them, got ",
               ranks);
}

BlockShares shares_of(const trie::Block& block, int64_t ranks) {
  BlockShares shares;
  const std::vector<int32_t>& source = block.edges.source;
  for (int64_t r = 0; r <= ranks; ++r) {
    const int64_t bound = block.num_own() * r / ranks;
    const auto row = std::lower_bound(source.begin(), source.end(), block.num_carried + bound);
    shares.token.push_back(bound);
    shares.row.push_back(row - source.begin());
    shares.edge.push_back(block.edges.row_offsets[shares.row.back()]);
  }
  return shares;
}

trie::Block part_of(const trie::Block& block, const BlockShares& shares, int64_t rank) {
  trie::Block part;
  const int64_t first = block.num_carried + shares.token[rank];
  const int64_t last = block.num_carried + shares.token[rank + 1];
  part.trie.tok.assign(block.trie.tok.begin() + first, block.trie.tok.begin() + last);
  part.trie.pos.assign(block.trie.pos.begin() + first, block.trie.pos.begin() + last);
  if (first == last) {
    part.trie.tok = {0};
    part.trie.pos = {0};
  }
  const trie::Edges& edges = block.edges;
  const int64_t first_edge = shares.edge[rank];
  for (int64_t row = shares.row[rank]; row < shares.row[rank + 1]; ++row) {
    part.edges.source.push_back(static_cast<int32_t>(edges.source[row] - first));
  }
  for (int64_t row = shares.row[rank]; row <= shares.row[rank + 1]; ++row) {
    part.edges.row_offsets.push_back(static_cast<int32_t>(edges.row_offsets[row] - first_edge));
  }
  part.edges.token.assign(edges.token.begin() + first_edge,
                          edges.token.begin() + shares.edge[rank + 1]);
  return part;
}

UlyssesAttention::UlyssesAttention(std::unique_ptr<AttentionContext> inner,
                                   parallel::Collectives& ranks,
                                   const BlockShares& shares)
    : inner_(std::move(inner)), ranks_(ranks), first_(shares.token[ranks.rank()]) {
  for (int64_t r = 0; r < ranks_.size(); ++r) {
    counts_.push_back(shares.token[r + 1] - shares.token[r]);
  }
}

at::Tensor UlyssesAttention::multiplicity() const {
  const at::Tensor all = inner_->multiplicity();
  if (!all.defined()) return all;
  const int64_t count = counts_[ranks_.rank()];
  return padded(all.narrow(0, first_, count), std::max<int64_t>(count, 1));
}

std::vector<at::Tensor> UlyssesAttention::heads_for(int64_t rank,
                                                    const at::Tensor& q,
                                                    const at::Tensor& k,
                                                    const at::Tensor& v) const {
  const int64_t heads = q.size(1) / ranks_.size();
  const KeyHeads keys = key_heads(rank, ranks_.size(), k.size(1));
  return {q.narrow(1, rank * heads, heads),
          k.narrow(1, keys.first, keys.count),
          v.narrow(1, keys.first, keys.count)};
}

// parts[r] [t, h, ...]: what rank r gets of the own tokens.
at::Tensor UlyssesAttention::to_heads(const std::vector<at::Tensor>& parts) const {
  const int64_t own = counts_[ranks_.rank()];
  return ranks_.all_to_all(
      at::cat(parts, 0).contiguous(), counts_, std::vector<int64_t>(ranks_.size(), own));
}

at::Tensor UlyssesAttention::to_tokens(const at::Tensor& x) const {
  const int64_t own = counts_[ranks_.rank()];
  const at::Tensor all =
      ranks_.all_to_all(x.contiguous(), std::vector<int64_t>(ranks_.size(), own), counts_);
  std::vector<int64_t> shape = {ranks_.size(), own};
  for (int64_t d = 1; d < x.dim(); ++d) shape.push_back(x.size(d));
  return all.view(shape);
}

at::Tensor UlyssesAttention::forward(int64_t layer,
                                     const at::Tensor& q,
                                     const at::Tensor& k,
                                     const at::Tensor& v,
                                     double scale,
                                     at::Tensor* lse) {
  std::vector<at::Tensor> parts;
  for (int64_t r = 0; r < ranks_.size(); ++r) {
    parts.push_back(at::cat(heads_for(r, own(q), own(k), own(v)), 1));
  }
  const at::Tensor all = to_heads(parts);  // [T, H / n + 2 K / n, D]
  const int64_t heads = q.size(1) / ranks_.size();
  const int64_t keys = (all.size(1) - heads) / 2;
  at::Tensor all_lse;
  const at::Tensor out = inner_->forward(layer,
                                         all.narrow(1, 0, heads).contiguous(),
                                         all.narrow(1, heads, keys).contiguous(),
                                         all.narrow(1, heads + keys, keys).contiguous(),
                                         scale,
                                         lse == nullptr ? nullptr : &all_lse);
  if (lse != nullptr) {
    *lse = padded(to_tokens(all_lse).permute({1, 0, 2}).flatten(1), q.size(0));
  }
  return padded(to_tokens(out).permute({1, 0, 2, 3}).flatten(1, 2), q.size(0));
}

AttentionGradients UlyssesAttention::backward(int64_t layer,
                                              const at::Tensor& grad_out,
                                              const at::Tensor& q,
                                              const at::Tensor& k,
                                              const at::Tensor& v,
                                              const at::Tensor& out,
                                              const at::Tensor& lse,
                                              double scale) {
  const int64_t size = ranks_.size();
  const int64_t heads = q.size(1) / size;
  std::vector<at::Tensor> parts;
  std::vector<at::Tensor> lse_parts;
  for (int64_t r = 0; r < size; ++r) {
    std::vector<at::Tensor> part = heads_for(r, own(q), own(k), own(v));
    part.push_back(own(out).narrow(1, r * heads, heads));
    part.push_back(own(grad_out).narrow(1, r * heads, heads));
    parts.push_back(at::cat(part, 1));
    lse_parts.push_back(own(lse).narrow(1, r * heads, heads));
  }
  const at::Tensor all = to_heads(parts);  // q, k, v, out, grad_out
  const int64_t keys = (all.size(1) - 3 * heads) / 2;
  const auto taken = [&](int64_t first, int64_t count) {
    return all.narrow(1, first, count).contiguous();
  };
  const AttentionGradients of_heads = inner_->backward(layer,
                                                       taken(2 * keys + 2 * heads, heads),
                                                       taken(0, heads),
                                                       taken(heads, keys),
                                                       taken(heads + keys, keys),
                                                       taken(heads + 2 * keys, heads),
                                                       to_heads(lse_parts),
                                                       scale);
  const at::Tensor back = to_tokens(at::cat({of_heads.dq, of_heads.dk, of_heads.dv}, 1));
  AttentionGradients gradients;
  gradients.dq = padded(back.narrow(2, 0, heads).permute({1, 0, 2, 3}).flatten(1, 2), q.size(0));
  const auto wide = k.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto of_keys = [&](int64_t first) {
    const at::Tensor sums = at::zeros(own(k).sizes(), k.options().dtype(wide));
    for (int64_t r = 0; r < size; ++r) {
      const KeyHeads read = key_heads(r, size, k.size(1));
      sums.narrow(1, read.first, read.count).add_(back[r].narrow(1, first, keys));
    }
    return padded(sums.to(k.scalar_type()), k.size(0));
  };
  gradients.dk = of_keys(heads);
  gradients.dv = of_keys(heads + keys);
  return gradients;
}

}  // namespace banyan::train
