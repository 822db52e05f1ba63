// Which rank computes which samples of a pass, and the passes that are spread so: each sample's
// numbers come from one rank and are told to all.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/parallel/collectives.h"
#include "banyan/train/batch.h"
#include "banyan/train/layout.h"
#include "banyan/train/passes.h"

namespace banyan::train {

struct Spread {
  std::vector<int64_t> own;  // places in `samples` that this rank computes, ascending
  double imbalance = 1.0;    // highest modelled time of a rank over the mean
};
// The samples of one row stay together, unless the last rank ends sooner when they do not. The
// first rank decides for all, by the cost model of `options`, which are those of the pass.
Spread spread_groups(const Batch& batch,
                     const std::vector<int64_t>& samples,
                     const trie::PlanOptions& options,
                     parallel::Collectives* ranks);

// score_batch with each valid trajectory scored by one rank and told to all.
BatchScores score_batch_over(const Batch& batch,
                             models::CausalLM& model,
                             const trie::PlanOptions& options,
                             const HeadSpec& head,
                             const std::string& name,
                             const Layout& layout);

// Numbers of `samples`, which may repeat: one list per place, each scored by one rank.
BatchScores score_places(const Batch& batch,
                         const std::vector<int64_t>& samples,
                         models::CausalLM& model,
                         const trie::PlanOptions& options,
                         const HeadSpec& head,
                         const Layout& layout);

// values[i] for each i of `places`.
std::vector<int64_t> chosen(const std::vector<int64_t>& values, const std::vector<int64_t>& places);

// Per sample: `own` holds the numbers of the places `places`; the whole list comes back.
TokenLists gather_lists(const std::vector<int64_t>& places,
                        const TokenLists& own,
                        int64_t size,
                        parallel::Collectives& ranks);

}  // namespace banyan::train
