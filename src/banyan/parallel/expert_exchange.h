// Rows on their way to the ranks that hold their experts, and back (specification parallel 7). The
// X experts are dealt out in equal runs: rank r of n holds [r X / n, (r + 1) X / n). A rank's rows
// are sorted by expert, so what goes to one rank is one run of them; a rank gets
//   [ rows of source 0 | rows of source 1 | ... ], each sorted by expert,
// and puts them in the order [expert][source]. Every row is moved, and none is dropped.
//
// Where m ranks hold a part of the same experts each, and each brings rows of its own, every one of
// them gets the rows of all, in the order [expert][rank]. On the way back what their parts give for
// a row is added in the order of the ranks, in fp32 (fp64), by the rank that brought it.
//
// Bytes sent by a rank: 8 X for the counts (n - 1 times: all_gather), and for each exchange the
// bytes of its rows that belong to other ranks (all_to_all). Over the ranks with other parts: 8 X /
// n for the counts (m - 1 times), the rows that it got m - 1 times there, and those of others back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/parallel/collectives.h"

namespace banyan::parallel {

class ExpertExchange {
 public:
  // (all) `offsets` [X + 1]: this rank's rows of each expert. X is a multiple of the ranks.
  // `parts`: ranks that hold parts of the same experts; null: they are whole here, or cut over
  // ranks that have equal rows.
  ExpertExchange(Collectives& ranks,
                 const std::vector<int64_t>& offsets,
                 Collectives* parts = nullptr);

  // [X / n + 1] of the rows that came: those of this rank's expert e are
  // [offsets()[e], offsets()[e + 1]).
  const std::vector<int64_t>& offsets() const {
    return parts_ == nullptr ? by_rank_.offsets : by_part_.offsets;
  }

  // (all) rows [S, ...] of this rank in the order of its offsets -> rows [R, ...] of its experts.
  at::Tensor to_experts(const at::Tensor& rows) const;
  // (all) The way back: [R, ...] -> [S, ...].
  at::Tensor to_tokens(const at::Tensor& rows) const;

 private:
  // Rows that come from several ranks, each sorted by expert.
  struct Arrival {
    std::vector<int64_t> sizes;    // rows from each rank
    std::vector<int64_t> offsets;  // by expert, of all
    at::Tensor by_expert;          // int64: place of each row as it came
    at::Tensor by_source;          // int64: the inverse
  };
  // counts [ranks, X]: rows of each expert that each rank has; of `num` experts from `first` on.
  static Arrival arrival_of(const at::Tensor& counts, int64_t first, int64_t num);
  // The number of rows that this rank has of its experts, for each of the ranks with other parts.
  std::vector<int64_t> own_to_each() const;

  Collectives& ranks_;
  Collectives* parts_;
  std::vector<int64_t> sent_;  // rows to each rank
  Arrival by_rank_;
  Arrival by_part_;
};

}  // namespace banyan::parallel
