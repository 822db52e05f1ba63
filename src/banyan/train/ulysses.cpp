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

std::vector<int64_t> token_bounds(int64_t count, int64_t ranks) {
  std::vector<int64_t> bounds(ranks + 1);
  for (int64_t r = 0; r <= ranks; ++r) bounds[r] = count * r / ranks;
  return bounds;
}

BlockSlice slice_of(const trie::Block& block, int64_t begin, int64_t end) {
  BlockSlice slice;
  const int64_t first = block.num_carried + begin;
  const int64_t last = block.num_carried + end;
  slice.block.trie.tok.assign(block.trie.tok.begin() + first, block.trie.tok.begin() + last);
  slice.block.trie.pos.assign(block.trie.pos.begin() + first, block.trie.pos.begin() + last);
  if (first == last) {
    slice.block.trie.tok = {0};
    slice.block.trie.pos = {0};
  }
  const trie::Edges& edges = block.edges;
  const auto row_of = [&](int64_t token) {
    return std::lower_bound(edges.source.begin(), edges.source.end(), token) - edges.source.begin();
  };
  slice.first_row = row_of(first);
  const int64_t last_row = row_of(last);
  slice.first_edge = edges.row_offsets[slice.first_row];
  trie::Edges& own = slice.block.edges;
  for (int64_t row = slice.first_row; row < last_row; ++row) {
    own.source.push_back(static_cast<int32_t>(edges.source[row] - first));
  }
  for (int64_t row = slice.first_row; row <= last_row; ++row) {
    own.row_offsets.push_back(static_cast<int32_t>(edges.row_offsets[row] - slice.first_edge));
  }
  own.token.assign(edges.token.begin() + slice.first_edge,
                   edges.token.begin() + edges.row_offsets[last_row]);
  return slice;
}

UlyssesAttention::UlyssesAttention(std::unique_ptr<AttentionContext> inner,
                                   parallel::Collectives& ranks,
                                   std::vector<int64_t> bounds)
    : inner_(std::move(inner)), ranks_(ranks) {
  for (int64_t r = 0; r < ranks_.size(); ++r) counts_.push_back(bounds[r + 1] - bounds[r]);
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
