// Rows on their way to the ranks that hold their experts, and back (specification parallel 7). The
// X experts are dealt out in equal runs: rank r of n holds [r X / n, (r + 1) X / n). A rank's rows
// are sorted by expert, so what goes to one rank is one run of them; a rank gets
//   [ rows of source 0 | rows of source 1 | ... ], each sorted by expert,
// and puts them in the order [expert][source]. Every row is moved, and none is dropped.
//
// Bytes sent by a rank: 8 X for the counts (n - 1 times: all_gather), and for each exchange the
// bytes of its rows that belong to other ranks (all_to_all).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/parallel/collectives.h"

namespace banyan::parallel {

class ExpertExchange {
 public:
  // (all) `offsets` [X + 1]: this rank's rows of each expert. X is a multiple of the ranks.
  ExpertExchange(Collectives& ranks, const std::vector<int64_t>& offsets);

  // [X / n + 1] of the rows that came: those of this rank's expert e are
  // [offsets()[e], offsets()[e + 1]).
  const std::vector<int64_t>& offsets() const { return own_offsets_; }

  // (all) rows [S, ...] of this rank in the order of its offsets -> rows [R, ...] of its experts.
  at::Tensor to_experts(const at::Tensor& rows) const;
  // (all) The way back: [R, ...] -> [S, ...].
  at::Tensor to_tokens(const at::Tensor& rows) const;

 private:
  Collectives& ranks_;
  std::vector<int64_t> sent_;      // rows to each rank
  std::vector<int64_t> received_;  // rows from each rank
  std::vector<int64_t> own_offsets_;
  at::Tensor by_expert_;  // [R] int64: place of each row as it came
  at::Tensor by_source_;  // [R] int64: the inverse
};

}  // namespace banyan::parallel
