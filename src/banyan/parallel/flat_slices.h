// Who owns which numbers of a model. The parameters are one stream of numbers in the order of the
// table, cut into buckets anywhere, each bucket into one piece per rank:
//   bucket b = [ piece of rank 0 | piece of rank 1 | ... ]   zeros behind its end, if need be
// A rank owns its piece of every bucket, whatever parameters lie in it: it adds the gradients of
// these numbers, holds their moments and steps them (ZeRO-1; Rajbhandari et al., "ZeRO: memory
// optimizations toward training trillion parameter models", 2020).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/parallel/collectives.h"

namespace banyan::parallel {

// Numbers of one bucket: 16 MB in fp32, three of which are in memory at a time.
inline constexpr int64_t kBucketElements = 4 << 20;

// A run of numbers of one tensor.
struct Range {
  size_t tensor = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

class FlatSlices {
 public:
  FlatSlices() = default;
  // `sizes` are the numbers of each tensor.
  FlatSlices(const std::vector<int64_t>& sizes, int64_t num_ranks, int64_t bucket_elements);

  // What `rank` owns, in the order of the stream.
  const std::vector<Range>& owned(int64_t rank) const { return owned_[rank]; }

  // Tensors are contiguous, of one type, with the sizes given; lists of them follow the order
  // above.
  //
  // Own numbers of `tensors` <- their sums over all ranks, in rank order; the others stay.
  void reduce(const std::vector<at::Tensor>& tensors, Collectives& ranks) const;
  // Numbers of `tensors` <- those of their owners.
  void gather(const std::vector<at::Tensor>& tensors, Collectives& ranks) const;

 private:
  struct Bucket {
    std::vector<Range> ranges;
    int64_t padded = 0;                      // a multiple of the number of ranks
    std::vector<std::vector<Range>> pieces;  // [ranks]
  };
  std::vector<Bucket> buckets_;
  std::vector<std::vector<Range>> owned_;  // [ranks]
};

// The numbers of a range as a 1-D view.
at::Tensor view_of(const at::Tensor& tensor, const Range& range);

}  // namespace banyan::parallel
