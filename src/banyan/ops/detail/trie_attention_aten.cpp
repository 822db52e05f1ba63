// Trie attention in plain LibTorch operators: one dense attention per segment over its gathered
// ancestors.
#include "banyan/ops/detail/trie_attention_aten.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "banyan/ops/detail/attention_aten.h"
#include "banyan/ops/detail/dtype.h"

namespace banyan::ops::detail {
namespace {

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

// The queries of a segment: rows of q, and the packed ranges that its last query sees.
struct Queries {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<trie::Range> path;
};

Queries queries_of(const trie::Trie& trie, int32_t segment, int64_t num_carried) {
  return {std::max<int64_t>(trie.segments[segment].begin - num_carried, 0),
          std::max<int64_t>(trie.segments[segment].end - num_carried, 0),
          path_ranges(trie, segment)};
}

}  // namespace

DenseAttention trie_attention_aten(const trie::Trie& trie,
                                   int64_t num_carried,
                                   const at::Tensor& q,
                                   const at::Tensor& k,
                                   const at::Tensor& v,
                                   double scale) {
  DenseAttention result;
  result.out = at::empty_like(q, at::MemoryFormat::Contiguous);
  result.lse =
      at::empty({q.size(0), q.size(1)}, q.options().dtype(accumulate_type(q.scalar_type())));
  for (int32_t s = 0; s < trie.num_segments(); ++s) {
    const Queries at = queries_of(trie, s, num_carried);
    if (at.begin == at.end) continue;
    const DenseAttention dense = dense_attention(
        q.slice(0, at.begin, at.end), gather(k, at.path), gather(v, at.path), scale);
    result.out.slice(0, at.begin, at.end).copy_(dense.out);
    result.lse.slice(0, at.begin, at.end).copy_(dense.lse);
  }
  return result;
}

DenseAttentionGradients trie_attention_aten_backward(const trie::Trie& trie,
                                                     int64_t num_carried,
                                                     const at::Tensor& grad_out,
                                                     const at::Tensor& q,
                                                     const at::Tensor& k,
                                                     const at::Tensor& v,
                                                     const at::Tensor& out,
                                                     const at::Tensor& lse,
                                                     double scale) {
  const auto wide = q.options().dtype(accumulate_type(q.scalar_type()));
  DenseAttentionGradients result;
  result.dq = at::empty_like(q, at::MemoryFormat::Contiguous);
  result.dk = at::zeros(k.sizes(), wide);
  result.dv = at::zeros(v.sizes(), wide);
  for (int32_t s = 0; s < trie.num_segments(); ++s) {
    const Queries at = queries_of(trie, s, num_carried);
    if (at.begin == at.end) continue;
    const DenseAttentionGradients dense =
        dense_attention_backward(grad_out.slice(0, at.begin, at.end),
                                 q.slice(0, at.begin, at.end),
                                 gather(k, at.path),
                                 gather(v, at.path),
                                 out.slice(0, at.begin, at.end),
                                 lse.slice(0, at.begin, at.end),
                                 scale);
    result.dq.slice(0, at.begin, at.end).copy_(dense.dq);
    scatter_add(result.dk, at.path, dense.dk);
    scatter_add(result.dv, at.path, dense.dv);
  }
  return result;
}

}  // namespace banyan::ops::detail
