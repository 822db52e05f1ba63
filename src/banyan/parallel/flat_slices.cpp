#include "banyan/parallel/flat_slices.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

// The part of `ranges`, laid out one after the other, that lies in [begin, end).
std::vector<Range> cut(const std::vector<Range>& ranges, int64_t begin, int64_t end) {
  std::vector<Range> out;
  int64_t at = 0;
  for (const Range& range : ranges) {
    const int64_t from = std::max(begin, at);
    const int64_t to = std::min(end, at + range.count);
    if (from < to) out.push_back({range.tensor, range.begin + from - at, to - from});
    at += range.count;
  }
  return out;
}

void pack(const std::vector<at::Tensor>& tensors,
          const std::vector<Range>& ranges,
          at::Tensor& flat) {
  int64_t at = 0;
  for (const Range& range : ranges) {
    flat.narrow(0, at, range.count).copy_(view_of(tensors[range.tensor], range));
    at += range.count;
  }
}

void unpack(const at::Tensor& flat,
            const std::vector<Range>& ranges,
            const std::vector<at::Tensor>& tensors) {
  int64_t at = 0;
  for (const Range& range : ranges) {
    view_of(tensors[range.tensor], range).copy_(flat.narrow(0, at, range.count));
    at += range.count;
  }
}

}  // namespace

at::Tensor view_of(const at::Tensor& tensor, const Range& range) {
  return tensor.view({-1}).narrow(0, range.begin, range.count);
}

FlatSlices::FlatSlices(const std::vector<int64_t>& sizes,
                       int64_t num_ranks,
                       int64_t bucket_elements)
    : owned_(num_ranks) {
  BANYAN_ASSERT(bucket_elements > 0 && num_ranks > 0, "buckets of ", bucket_elements);
  std::vector<Range> stream;
  for (size_t i = 0; i < sizes.size(); ++i) stream.push_back({i, 0, sizes[i]});
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  for (int64_t begin = 0; begin < total; begin += bucket_elements) {
    const int64_t end = std::min(total, begin + bucket_elements);
    Bucket bucket{cut(stream, begin, end), 0, {}};
    const int64_t piece = (end - begin + num_ranks - 1) / num_ranks;
    bucket.padded = piece * num_ranks;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      bucket.pieces.push_back(cut(bucket.ranges, rank * piece, (rank + 1) * piece));
      owned_[rank].insert(
          owned_[rank].end(), bucket.pieces.back().begin(), bucket.pieces.back().end());
    }
    buckets_.push_back(std::move(bucket));
  }
}

void FlatSlices::reduce(const std::vector<at::Tensor>& tensors, Collectives& ranks) const {
  if (ranks.is_alone()) return;
  for (const Bucket& bucket : buckets_) {
    at::Tensor flat = at::zeros({bucket.padded}, tensors[0].options());
    pack(tensors, bucket.ranges, flat);
    unpack(ranks.reduce_scatter_sum(flat), bucket.pieces[ranks.rank()], tensors);
  }
}

void FlatSlices::gather(const std::vector<at::Tensor>& tensors, Collectives& ranks) const {
  if (ranks.is_alone()) return;
  for (const Bucket& bucket : buckets_) {
    at::Tensor own = at::zeros({bucket.padded / ranks.size()}, tensors[0].options());
    pack(tensors, bucket.pieces[ranks.rank()], own);
    unpack(ranks.all_gather(own).view({-1}), bucket.ranges, tensors);
  }
}

}  // namespace banyan::parallel
