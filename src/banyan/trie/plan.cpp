// The way from a batch to a plan: order the samples, decide what is shared and where to cut,
// assemble.
#include "banyan/trie/plan.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/trie/detail/assemble.h"
#include "banyan/trie/detail/cutter.h"
#include "banyan/trie/detail/fork_tree.h"
#include "banyan/trie/detail/forward_cuts.h"
#include "banyan/trie/detail/order.h"
#include "banyan/trie/detail/small_search.h"

namespace banyan::trie {
namespace {

void check_options(const std::vector<Sample>& samples, const PlanOptions& options) {
  const auto check = [](const char* name, int64_t limit) {
    BANYAN_CHECK(limit >= 0, "[plan] ", name, ": wanted >= 0, got ", limit);
  };
  check("max_tokens_per_block", options.max_tokens_per_block);
  check("max_samples_per_block", options.max_samples_per_block);
  check("max_path_tokens", options.max_path_tokens);
  if (options.max_path_tokens == 0) return;
  for (const Sample& sample : samples) {
    BANYAN_CHECK(static_cast<int64_t>(sample.tokens.size()) <= options.max_path_tokens,
                 "[plan] sample ",
                 sample.uid,
                 ": wanted at most max_path_tokens=",
                 options.max_path_tokens,
                 " tokens, got ",
                 sample.tokens.size(),
                 "; shorten it or raise sharing.max_path_tokens");
  }
}

// Blocks in packed order to cuts: what a block computes again is not merged with the block in
// front.
detail::Cuts to_cuts(detail::Order order, const std::vector<detail::CutBlock>& blocks) {
  detail::Cuts cuts;
  int64_t end = 0;
  for (const detail::CutBlock& block : blocks) {
    int32_t& shared = order.shared[block.sample];
    shared = std::min(shared, block.carried);
    end += block.tokens;
    cuts.ends.push_back(static_cast<int32_t>(end));
    cuts.policies.push_back(block.policy);
  }
  cuts.order = std::move(order);
  return cuts;
}

// Cuts anywhere in the packed order: everything stays merged.
detail::Cuts to_forward_cuts(detail::Order order, const std::vector<detail::CutBlock>& blocks) {
  detail::Cuts cuts;
  cuts.order = std::move(order);
  int64_t end = 0;
  for (const detail::CutBlock& block : blocks) {
    end += block.tokens;
    cuts.ends.push_back(static_cast<int32_t>(end));
  }
  cuts.policies.assign(blocks.size(), CarryPolicy::kRetain);
  return cuts;
}

std::string forced_warning(const PlanOptions& options, int64_t forced) {
  const char* names[] = {"auto", "retain", "recompute", "replay"};
  return ::banyan::detail::concat("sharing.carry=",
                                  names[static_cast<int>(options.carry)],
                                  " and ",
                                  options.max_samples_per_block,
                                  " samples per block (0 = any) cannot hold everywhere within ",
                                  options.max_tokens_per_block,
                                  " tokens: ",
                                  forced,
                                  " blocks go another way");
}

int64_t unique_tokens(const std::vector<Sample>& samples, const detail::Order& order) {
  int64_t tokens = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    tokens += static_cast<int64_t>(samples[order.samples[i]].tokens.size()) - order.shared[i];
  }
  return tokens;
}

}  // namespace

Plan plan(const std::vector<Sample>& samples, const PlanOptions& options) {
  check_options(samples, options);
  detail::Order order = detail::order_samples(samples, options.build);
  if (samples.empty()) return {};
  const int64_t num_unique = unique_tokens(samples, order);
  if (options.unshare_margin > 0.0) {
    detail::unshare_trees(samples, options.cost, options.unshare_margin, order);
  }
  const bool with_rows = options.cost.per_head_row > 0.0;
  const detail::ForkTree tree(samples, order, with_rows);
  detail::CutList list;
  if (options.for_backward) {
    list = detail::cut(tree, options);
    detail::search_small(tree, options, list);
  } else {
    list = detail::cut_forward(tree, options);
  }
  const detail::Cuts cuts = options.for_backward ? to_cuts(std::move(order), list.blocks)
                                                 : to_forward_cuts(std::move(order), list.blocks);
  Plan plan = detail::assemble(samples, cuts, options);
  plan.num_unique = num_unique;
  if (list.forced > 0) plan.warnings.push_back(forced_warning(options, list.forced));
  return plan;
}

Plan plan_with_cuts(const std::vector<Sample>& samples,
                    const std::vector<int32_t>& positions,
                    CarryPolicy policy,
                    const PlanOptions& options) {
  check_options(samples, options);
  detail::Cuts cuts;
  cuts.order = detail::order_samples(samples, options.build);
  if (samples.empty()) return {};
  const int64_t num_unique = unique_tokens(samples, cuts.order);
  int64_t last = 0;
  for (const int32_t position : positions) {
    BANYAN_CHECK(last < position && position < num_unique,
                 "[plan] cut: wanted ascending positions inside (0, ",
                 num_unique,
                 "), got ",
                 position);
    last = position;
  }
  cuts.ends = positions;
  cuts.ends.push_back(static_cast<int32_t>(num_unique));
  cuts.policies.assign(cuts.ends.size(), policy);
  Plan plan = detail::assemble(samples, cuts, options);
  plan.num_unique = num_unique;
  return plan;
}

Counts counts_of(const Plan& plan) {
  Counts counts;
  counts.blocks = static_cast<int64_t>(plan.blocks.size());
  counts.tokens = plan.num_computed;
  counts.pairs = plan.num_pairs;
  counts.carried = plan.num_carried;
  counts.recomputed = plan.num_recomputed;
  for (const Block& block : plan.blocks) {
    counts.head_rows += static_cast<int64_t>(block.edges.source.size());
    for (const Segment& segment : block.trie.segments) {
      const bool own = segment.begin >= block.num_carried;
      counts.forks += own && block.trie.par[segment.begin] != segment.begin - 1 ? 1 : 0;
    }
  }
  return counts;
}

}  // namespace banyan::trie
