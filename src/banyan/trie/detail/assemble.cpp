// Blocks [b, e) of the packed order. Every ancestor of a token of [b, e) that stands in front of b
// is an ancestor of b itself, so the carried tokens are the path of b: the one at depth d gets the
// local index d, own token u the local index dep(b) + u - b. Offered are the ancestors of e inside
// [b, e), and what a later block takes of them is a prefix.
#include "banyan/trie/detail/assemble.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::trie::detail {
namespace {

class Assembler {
 public:
  Assembler(const Trie& trie, const Edges& edges, const std::vector<int32_t>& ends)
      : trie_(trie), edges_(edges), block_of_(trie.tok.size()) {
    int32_t begin = 0;
    for (size_t i = 0; i < ends.size(); begin = ends[i++]) {
      std::fill(block_of_.begin() + begin, block_of_.begin() + ends[i], static_cast<int32_t>(i));
    }
  }

  int32_t block_of(int32_t token) const { return block_of_[token]; }

  Block make(int32_t begin, int32_t end) const {
    Block block;
    block.num_carried = trie_.dep[begin];
    std::vector<int32_t> carried(block.num_carried);
    for (int32_t u = trie_.par[begin]; u >= 0; u = trie_.par[u]) carried[trie_.dep[u]] = u;
    for (const int32_t u : carried) {
      const int32_t from = block_of_[u];
      if (block.carried.empty() || block.carried.back().block != from) {
        block.carried.push_back({from, 0});
      }
      ++block.carried.back().count;
    }
    fill_tokens(block, carried, begin, end);
    cut_segments(block, carried, begin);
    list_ancestors(block.trie);
    if (end < trie_.num_tokens()) {
      for (int32_t u = trie_.par[end]; u >= begin; u = trie_.par[u]) {
        block.offered.push_back(block.num_carried + u - begin);
      }
      std::reverse(block.offered.begin(), block.offered.end());
    }
    fill_edges(block, begin, end);
    return block;
  }

  // First head row of the whole trie whose source is not in front of `token`.
  int32_t first_row(int32_t token) const {
    const auto at = std::lower_bound(edges_.source.begin(), edges_.source.end(), token);
    return static_cast<int32_t>(at - edges_.source.begin());
  }

 private:
  void fill_tokens(Block& block,
                   const std::vector<int32_t>& carried,
                   int32_t begin,
                   int32_t end) const {
    Trie& out = block.trie;
    for (auto* array : {&out.tok, &out.pos, &out.dep, &out.par, &out.tout, &out.seg}) {
      array->reserve(carried.size() + end - begin);
    }
    const auto add = [&](int32_t u, int32_t parent) {
      out.tok.push_back(trie_.tok[u]);
      out.pos.push_back(trie_.pos[u]);
      out.dep.push_back(trie_.dep[u]);
      out.par.push_back(parent);
      out.tout.push_back(block.num_carried + std::min(trie_.tout[u], end) - begin);
    };
    for (const int32_t u : carried) add(u, trie_.dep[u] - 1);
    for (int32_t u = begin; u < end; ++u) {
      const int32_t parent = trie_.par[u];
      add(u, parent >= begin ? block.num_carried + parent - begin : trie_.dep[u] - 1);
    }
  }

  // A segment is a chain with one `tout`; own ones end where those of the whole trie do. The number
  // of samples of a carried segment is that of its last token.
  void cut_segments(Block& block, const std::vector<int32_t>& carried, int32_t begin) const {
    Trie& out = block.trie;
    for (int32_t i = 0; i < out.num_tokens(); ++i) {
      const bool own = i >= block.num_carried;
      const int32_t u = own ? begin + i - block.num_carried : carried[i];
      const int32_t parent = out.par[i];
      const bool starts = i == 0 || parent != i - 1 || out.tout[i] != out.tout[i - 1] ||
                          i == block.num_carried || (own && trie_.seg[u] != trie_.seg[u - 1]);
      if (starts) {
        const int32_t above = parent < 0 ? -1 : out.seg[parent];
        out.segments.push_back({i, i, out.tout[i], above, 0, out.dep[i]});
      }
      out.seg.push_back(out.num_segments() - 1);
      out.segments.back().end = i + 1;
      out.segments.back().num_samples = trie_.segments[trie_.seg[u]].num_samples;
    }
  }

  void fill_edges(Block& block, int32_t begin, int32_t end) const {
    const int32_t first = first_row(begin);
    const int32_t last = first_row(end);
    const int32_t edge = edges_.row_offsets[first];
    for (int32_t r = first; r < last; ++r) {
      block.edges.source.push_back(block.num_carried + edges_.source[r] - begin);
    }
    for (int32_t r = first; r <= last; ++r) {
      block.edges.row_offsets.push_back(edges_.row_offsets[r] - edge);
    }
    block.edges.token.assign(edges_.token.begin() + edge,
                             edges_.token.begin() + edges_.row_offsets[last]);
  }

  const Trie& trie_;
  const Edges& edges_;
  std::vector<int32_t> block_of_;
};

// Samples of the order to the blocks of their last tokens.
void place_samples(const std::vector<Sample>& samples,
                   const Trie& trie,
                   const Cuts& cuts,
                   const Assembler& assembler,
                   std::vector<Block>& blocks) {
  for (const int32_t s : cuts.order.samples) {
    const int32_t b = assembler.block_of(trie.sample_end[s]);
    Block& block = blocks[b];
    const int32_t begin = b == 0 ? 0 : cuts.ends[b - 1];
    block.samples.push_back(s);
    block.trie.sample_end.push_back(block.num_carried + trie.sample_end[s] - begin);
    block.trie.num_logical += static_cast<int64_t>(samples[s].tokens.size());
  }
}

// Edges and rows of the whole trie to those of the blocks of their sources.
void localise(LogicalTokens& logical,
              const Edges& edges,
              const Assembler& assembler,
              const std::vector<int32_t>& ends) {
  std::vector<int32_t> first_row(1, 0);
  for (const int32_t end : ends) first_row.push_back(assembler.first_row(end));
  for (size_t u = 0; u < logical.block.size(); ++u) {
    const int32_t b = assembler.block_of(edges.source[logical.row[u]]);
    logical.block[u] = b;
    logical.row[u] -= first_row[b];
    logical.edge[u] -= edges.row_offsets[first_row[b]];
  }
}

void close_blocks(std::vector<Block>& blocks) {
  std::vector<int32_t> last(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    last[i] = static_cast<int32_t>(i);
    for (const Carried& from : blocks[i].carried) last[from.block] = static_cast<int32_t>(i);
  }
  const std::vector<int32_t> close = closing_blocks(last);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i].close = close[i];
}

}  // namespace

std::vector<int32_t> closing_blocks(const std::vector<int32_t>& last_consumer) {
  // Descendants of a block lie in one run behind it, so the largest close of that run is wanted:
  // walking backwards, merged runs hang below a stack of those not yet swallowed.
  std::vector<int32_t> close(last_consumer.size());
  std::vector<int32_t> stack;  // blocks not inside the run of a later one on the stack
  for (auto i = static_cast<int32_t>(last_consumer.size()) - 1; i >= 0; --i) {
    close[i] = last_consumer[i];
    while (!stack.empty() && stack.back() <= last_consumer[i]) {
      close[i] = std::max(close[i], close[stack.back()]);
      stack.pop_back();
    }
    stack.push_back(i);
  }
  return close;
}

std::vector<Entry> order_entries(const std::vector<Block>& blocks, bool for_backward) {
  std::vector<std::vector<int32_t>> closes(blocks.size());
  for (size_t i = blocks.size(); i > 0; --i) {
    closes[blocks[i - 1].close].push_back(static_cast<int32_t>(i - 1));
  }
  std::vector<Entry> entries;
  for (size_t i = 0; i < blocks.size(); ++i) {
    entries.push_back({Action::kForward, static_cast<int32_t>(i)});
    if (!blocks[i].samples.empty()) entries.push_back({Action::kLoss, static_cast<int32_t>(i)});
    if (!for_backward) continue;
    for (const int32_t b : closes[i]) {
      const bool again = blocks[b].policy == CarryPolicy::kRecompute && !blocks[b].offered.empty();
      if (again) entries.push_back({Action::kRecompute, b});
      entries.push_back({Action::kBackward, b});
    }
  }
  return entries;
}

Plan assemble(const std::vector<Sample>& samples, const Cuts& cuts, const PlanOptions& options) {
  Trie trie = pack(samples, cuts.order, 0, static_cast<int32_t>(samples.size()));
  const std::vector<int32_t> in_order = trie.sample_end;
  for (size_t i = 0; i < samples.size(); ++i) trie.sample_end[cuts.order.samples[i]] = in_order[i];
  Plan plan;
  plan.num_logical = trie.num_logical;
  plan.num_computed = trie.num_tokens();
  plan.num_pairs = trie.num_pairs();
  const Edges edges = edges_of(trie, samples, &plan.logical);
  const Assembler assembler(trie, edges, cuts.ends);
  int32_t begin = 0;
  for (size_t i = 0; i < cuts.ends.size(); begin = cuts.ends[i++]) {
    Block& block = plan.blocks.emplace_back(assembler.make(begin, cuts.ends[i]));
    if (!block.offered.empty()) block.policy = cuts.policies[i];
    plan.num_carried += block.num_carried;
    if (options.for_backward && block.policy == CarryPolicy::kRecompute) {
      plan.num_recomputed += block.num_own();
    }
  }
  place_samples(samples, trie, cuts, assembler, plan.blocks);
  localise(plan.logical, edges, assembler, cuts.ends);
  close_blocks(plan.blocks);
  plan.entries = order_entries(plan.blocks, options.for_backward);
  plan.modelled_seconds = options.cost.seconds(counts_of(plan));
  return plan;
}

}  // namespace banyan::trie::detail
