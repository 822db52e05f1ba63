// Dispatch of trie attention: the native kernels on tiles (forward) and chunks (backward) of the
// trie, or one dense attention per segment over its gathered ancestors in plain LibTorch operators.
#include "banyan/ops/trie_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/attention_backward.h"
#include "banyan/kernels/cpu/scratch.h"
#include "banyan/kernels/cpu/work_items.h"
#include "banyan/ops/detail/attention_aten.h"
#include "banyan/ops/detail/attention_check.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/trie_index.h"

namespace banyan::ops {

static_assert(kPathTile == kernels::kTileTokens);

struct TrieAttention::Index {
  const trie::Trie& trie;
  std::optional<detail::TrieTiles> tiles;    // native, from the first forward
  std::optional<detail::TrieChunks> chunks;  // native, from the first backward
  kernels::Scratch tile_memory;              // packed keys and values of one layer
  kernels::Scratch pack_memory;              // packed operands of the backward
};

namespace {

using detail::bf16_bits;

// Packs the keys and values of every tile: [tiles, K, tile_elements(D)].
const uint16_t* pack_tiles(const detail::TrieTiles& tiles,
                           const at::Tensor& k,
                           const at::Tensor& v,
                           kernels::Scratch& memory) {
  const int64_t kv_heads = k.size(1);
  const int64_t dim = k.size(2);
  const int64_t size = kernels::tile_elements(dim);
  uint16_t* packed = memory.get<uint16_t>(tiles.num_tiles() * kv_heads * size);
  const uint16_t* keys = bf16_bits(k);
  const uint16_t* values = bf16_bits(v);
  kernels::for_each_item(tiles.num_tiles(), [&](const auto& next) {
    const uint16_t* rows[kernels::kTileTokens];
    for (int64_t tile = next(); tile >= 0; tile = next()) {
      const int32_t* tokens = tiles.tokens.data() + tiles.token_offsets[tile];
      const int64_t n = tiles.token_offsets[tile + 1] - tiles.token_offsets[tile];
      for (int64_t head = 0; head < kv_heads; ++head) {
        uint16_t* out = packed + (tile * kv_heads + head) * size;
        for (int64_t i = 0; i < n; ++i) rows[i] = keys + (tokens[i] * kv_heads + head) * dim;
        kernels::pack_columns(rows, n, kernels::kTileTokens, dim, out);
        for (int64_t i = 0; i < n; ++i) rows[i] = values + (tokens[i] * kv_heads + head) * dim;
        kernels::pack_pairs(rows, n, kernels::kTileTokens, dim, out + kernels::kTileTokens * dim);
      }
    }
  });
  return packed;
}

// Packed ranges of the path of a segment, its own tokens last.
std::vector<trie::Range> path_ranges(const trie::Trie& trie, int32_t segment) {
  std::vector<trie::Range> ranges(trie.ancestors.begin() + trie.ancestor_offsets[segment],
                                  trie.ancestors.begin() + trie.ancestor_offsets[segment + 1]);
  ranges.push_back({trie.segments[segment].begin, trie.segments[segment].end});
  return ranges;
}

at::Tensor gather(const at::Tensor& x, const std::vector<trie::Range>& ranges) {
  if (ranges.size() == 1) return x.slice(0, ranges[0].begin, ranges[0].end);
  std::vector<at::Tensor> parts;
  parts.reserve(ranges.size());
  for (const trie::Range& range : ranges) parts.push_back(x.slice(0, range.begin, range.end));
  return at::cat(parts, 0);
}

// x[ranges] += grad, range by range.
void scatter_add(at::Tensor& x, const std::vector<trie::Range>& ranges, const at::Tensor& grad) {
  int64_t at = 0;
  for (const trie::Range& range : ranges) {
    const int64_t length = range.end - range.begin;
    x.slice(0, range.begin, range.end).add_(grad.slice(0, at, at + length));
    at += length;
  }
}

at::Tensor forward_aten(const trie::Trie& trie,
                        const at::Tensor& q,
                        const at::Tensor& k,
                        const at::Tensor& v,
                        double scale,
                        at::Tensor* lse) {
  at::Tensor out = at::empty_like(q, at::MemoryFormat::Contiguous);
  if (lse != nullptr) {
    *lse = at::empty({q.size(0), q.size(1)},
                     q.options().dtype(detail::accumulate_type(q.scalar_type())));
  }
  for (int32_t s = 0; s < trie.num_segments(); ++s) {
    const trie::Segment& segment = trie.segments[s];
    const std::vector<trie::Range> ranges = path_ranges(trie, s);
    const detail::DenseAttention dense = detail::dense_attention(
        q.slice(0, segment.begin, segment.end), gather(k, ranges), gather(v, ranges), scale);
    out.slice(0, segment.begin, segment.end).copy_(dense.out);
    if (lse != nullptr) lse->slice(0, segment.begin, segment.end).copy_(dense.lse);
  }
  return out;
}

AttentionGradients backward_aten(const trie::Trie& trie,
                                 const at::Tensor& grad_out,
                                 const at::Tensor& q,
                                 const at::Tensor& k,
                                 const at::Tensor& v,
                                 const at::Tensor& out,
                                 const at::Tensor& lse,
                                 double scale) {
  const auto wide = q.options().dtype(detail::accumulate_type(q.scalar_type()));
  at::Tensor dq = at::empty_like(q, at::MemoryFormat::Contiguous);
  at::Tensor dk = at::zeros(k.sizes(), wide);
  at::Tensor dv = at::zeros(v.sizes(), wide);
  for (int32_t s = 0; s < trie.num_segments(); ++s) {
    const int64_t begin = trie.segments[s].begin;
    const int64_t end = trie.segments[s].end;
    const std::vector<trie::Range> ranges = path_ranges(trie, s);
    const detail::DenseAttentionGradients dense =
        detail::dense_attention_backward(grad_out.slice(0, begin, end),
                                         q.slice(0, begin, end),
                                         gather(k, ranges),
                                         gather(v, ranges),
                                         out.slice(0, begin, end),
                                         lse.slice(0, begin, end),
                                         scale);
    dq.slice(0, begin, end).copy_(dense.dq);
    scatter_add(dk, ranges, dense.dk);
    scatter_add(dv, ranges, dense.dv);
  }
  return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

}  // namespace

TrieAttention::TrieAttention(const trie::Trie& trie, const ComputeOptions& options)
    : index_(std::make_unique<Index>(Index{trie, {}, {}, {}, {}})), options_(options) {}

TrieAttention::~TrieAttention() = default;

at::Tensor TrieAttention::forward(int64_t /*layer*/,
                                  const at::Tensor& q,
                                  const at::Tensor& k,
                                  const at::Tensor& v,
                                  double scale,
                                  at::Tensor* lse) {
  detail::check_attention_inputs("trie_attention", index_->trie.num_tokens(), q, k, v, options_);
  if (!is_native(options_)) return forward_aten(index_->trie, q, k, v, scale, lse);

  if (!index_->tiles) index_->tiles = detail::build_tiles(index_->trie);
  const at::Tensor queries = q.contiguous();
  at::Tensor out = at::empty_like(queries);
  if (lse != nullptr) {
    *lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  }
  kernels::AttendInput input;
  input.shape = detail::attention_shape(q, k, scale);
  input.num_tokens = q.size(0);
  input.q = bf16_bits(queries);
  input.tiles = pack_tiles(*index_->tiles, k.contiguous(), v.contiguous(), index_->tile_memory);
  input.tile_lists = index_->tiles->tile_list.data();
  input.visible = index_->tiles->visible.data();
  kernels::attend(input, bf16_bits(out), lse == nullptr ? nullptr : lse->data_ptr<float>());
  return out;
}

AttentionGradients TrieAttention::backward(int64_t /*layer*/,
                                           const at::Tensor& grad_out,
                                           const at::Tensor& q,
                                           const at::Tensor& k,
                                           const at::Tensor& v,
                                           const at::Tensor& out,
                                           const at::Tensor& lse,
                                           double scale) {
  detail::check_attention_inputs("trie_attention", index_->trie.num_tokens(), q, k, v, options_);
  BANYAN_CHECK(grad_out.sizes() == q.sizes() && out.sizes() == q.sizes() &&
                   grad_out.scalar_type() == q.scalar_type() &&
                   out.scalar_type() == q.scalar_type(),
               "[trie_attention] grad_out, out: wanted q's shape and dtype ",
               q.sizes(),
               ", got ",
               grad_out.sizes(),
               " and ",
               out.sizes());
  BANYAN_CHECK(lse.dim() == 2 && lse.size(0) == q.size(0) && lse.size(1) == q.size(1) &&
                   lse.scalar_type() == detail::accumulate_type(q.scalar_type()),
               "[trie_attention] lse: wanted what forward wrote, [",
               q.size(0),
               ", ",
               q.size(1),
               "], got ",
               lse.sizes());
  if (!is_native(options_)) {
    return backward_aten(index_->trie, grad_out, q, k, v, out, lse, scale);
  }

  if (!index_->chunks) index_->chunks = detail::build_chunks(index_->trie);
  const at::Tensor queries = q.contiguous();
  const at::Tensor keys = k.contiguous();
  const at::Tensor values = v.contiguous();
  const at::Tensor outputs = out.contiguous();
  const at::Tensor grads = grad_out.contiguous();
  const at::Tensor row_lse = lse.contiguous();
  AttentionGradients result{at::empty_like(queries), at::empty_like(keys), at::empty_like(values)};

  kernels::AttendBackwardInput input;
  input.shape = detail::attention_shape(q, k, scale);
  input.q = bf16_bits(queries);
  input.k = bf16_bits(keys);
  input.v = bf16_bits(values);
  input.out = bf16_bits(outputs);
  input.grad_out = bf16_bits(grads);
  input.lse = row_lse.data_ptr<float>();
  input.chunks = index_->chunks->chunks.data();
  input.num_chunks = static_cast<int64_t>(index_->chunks->chunks.size());
  input.max_depth = index_->chunks->max_depth;
  kernels::attend_backward(
      input,
      {.dq = bf16_bits(result.dq), .dk = bf16_bits(result.dk), .dv = bf16_bits(result.dv)},
      index_->pack_memory);
  return result;
}

}  // namespace banyan::ops
