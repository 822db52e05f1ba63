// Nodes are named (block, own token). A sample's path is walked upwards through `par`, and through
// `carried` into earlier blocks, so nothing of how plans are made is used to check them.
#include "banyan/testing/plan_check.h"

#include <algorithm>
#include <map>
#include <set>

#include "banyan/core/error.h"

namespace banyan::testing {
namespace {

using trie::Action;
using trie::Block;
using trie::CarryPolicy;
using trie::Entry;
using trie::Plan;
using Node = std::pair<int32_t, int32_t>;  // block, token of its trie

class Checker {
 public:
  Checker(const std::vector<Sample>& samples, const trie::PlanOptions& options, const Plan& plan)
      : samples_(samples), options_(options), plan_(plan) {}

  std::vector<std::string> run(bool uniform) {
    for (size_t b = 0; b < plan_.blocks.size(); ++b) {
      check_trie(static_cast<int32_t>(b));
      check_carried(static_cast<int32_t>(b));
      if (uniform) check_uniform(static_cast<int32_t>(b));
    }
    if (errors_.empty()) check_offered();
    if (errors_.empty()) check_samples();
    if (errors_.empty()) check_edges();
    if (errors_.empty()) check_entries();
    if (errors_.empty()) check_totals();
    return errors_;
  }

 private:
  template <typename... Parts>
  bool expect(bool right, const Parts&... parts) {
    if (!right) errors_.push_back(::banyan::detail::concat(parts...));
    return right;
  }

  // The local trie by its definition: parents, depths, subtree ends, segments and their ancestors.
  void check_trie(int32_t b) {
    const Block& block = plan_.blocks[b];
    const trie::Trie& t = block.trie;
    const int32_t size = t.num_tokens();
    bool right = block.num_carried >= 0 && block.num_carried < size;
    std::vector<int32_t> tout(size);
    for (int32_t u = size - 1; u >= 0; --u) {
      tout[u] = std::max(tout[u], u + 1);
      if (t.par[u] >= 0) tout[t.par[u]] = std::max(tout[t.par[u]], tout[u]);
    }
    for (int32_t u = 0; u < size && right; ++u) {
      right = t.par[u] < u && t.tout[u] == tout[u] &&
              t.dep[u] == (t.par[u] < 0 ? 0 : t.dep[t.par[u]] + 1);
      if (u < block.num_carried) right = right && t.par[u] == u - 1;
    }
    expect(right, "block ", b, ": tokens are not a packed trie");
    int32_t begin = 0;
    for (int32_t n = 0; n < t.num_segments() && right; ++n) {
      const trie::Segment& s = t.segments[n];
      right = s.begin == begin && s.begin < s.end && s.depth == t.dep[s.begin] &&
              (s.end <= block.num_carried || s.begin >= block.num_carried);
      for (int32_t u = s.begin; u < s.end && right; ++u) {
        right = t.seg[u] == n && t.tout[u] == s.tout && (u == s.begin || t.par[u] == u - 1);
      }
      std::set<int32_t> ancestors;
      for (int32_t u = t.par[s.begin]; u >= 0; u = t.par[u]) ancestors.insert(u);
      for (int32_t i = t.ancestor_offsets[n]; i < t.ancestor_offsets[n + 1]; ++i) {
        for (int32_t u = t.ancestors[i].begin; u < t.ancestors[i].end; ++u) {
          right = right && ancestors.erase(u) == 1;
        }
      }
      right = right && ancestors.empty() &&
              s.parent == (t.par[s.begin] < 0 ? -1 : t.seg[t.par[s.begin]]);
      begin = s.end;
    }
    expect(right && begin == size, "block ", b, ": segments");
  }

  void check_carried(int32_t b) {
    const Block& block = plan_.blocks[b];
    int32_t at = 0;
    for (const trie::Carried& from : block.carried) {
      if (!expect(from.block >= 0 && from.block < b && from.count > 0,
                  "block ",
                  b,
                  ": carried from block ",
                  from.block)) {
        return;
      }
      const Block& source = plan_.blocks[from.block];
      bool right = from.count <= static_cast<int32_t>(source.offered.size());
      for (int32_t i = 0; i < from.count && right; ++i, ++at) {
        const int32_t u = source.offered[i];
        right = source.trie.tok[u] == block.trie.tok[at] &&
                source.trie.pos[u] == block.trie.pos[at] && source.trie.dep[u] == at;
      }
      if (!expect(right, "block ", b, ": not what block ", from.block, " offers")) return;
    }
    expect(at == block.num_carried, "block ", b, ": carried counts do not add up");
  }

  void check_uniform(int32_t b) {
    const Block& block = plan_.blocks[b];
    expect(block.offered.empty() || static_cast<int32_t>(block.offered.size()) == block.num_own(),
           "block ",
           b,
           ": open and closed tokens together");
  }

  // Offered is a path of own tokens, and all of it is used by somebody.
  void check_offered() {
    std::vector<int32_t> used(plan_.blocks.size(), 0);
    for (const Block& block : plan_.blocks) {
      for (const trie::Carried& from : block.carried) {
        used[from.block] = std::max(used[from.block], from.count);
      }
    }
    for (size_t b = 0; b < plan_.blocks.size(); ++b) {
      const Block& block = plan_.blocks[b];
      bool right = used[b] == static_cast<int32_t>(block.offered.size());
      for (size_t i = 0; i < block.offered.size(); ++i) {
        const int32_t parent = block.trie.par[block.offered[i]];
        right = right && block.offered[i] >= block.num_carried &&
                (i == 0 ? parent < block.num_carried : parent == block.offered[i - 1]);
      }
      expect(right, "block ", b, ": offered");
    }
  }

  Node parent(Node node) const {
    const Block& block = plan_.blocks[node.first];
    const int32_t up = block.trie.par[node.second];
    if (up < 0) return {-1, -1};
    if (up >= block.num_carried) return {node.first, up};
    int32_t begin = 0;
    for (const trie::Carried& from : block.carried) {
      if (up < begin + from.count) {
        return {from.block, plan_.blocks[from.block].offered[up - begin]};
      }
      begin += from.count;
    }
    return {-1, -1};
  }

  // Every sample ends in one block and its path spells its tokens.
  void check_samples() {
    paths_.assign(samples_.size(), {});
    std::vector<int32_t> seen(samples_.size(), 0);
    for (size_t b = 0; b < plan_.blocks.size(); ++b) {
      const Block& block = plan_.blocks[b];
      if (!expect(block.samples.size() == block.trie.sample_end.size(), "block ", b, ": samples")) {
        return;
      }
      for (size_t i = 0; i < block.samples.size(); ++i) {
        const int32_t s = block.samples[i];
        ++seen[s];
        Node node = {static_cast<int32_t>(b), block.trie.sample_end[i]};
        bool right = node.second >= block.num_carried;
        for (; node.first >= 0; node = parent(node)) paths_[s].push_back(node);
        std::reverse(paths_[s].begin(), paths_[s].end());
        const Sample& sample = samples_[s];
        right = right && paths_[s].size() == sample.tokens.size();
        for (size_t t = 0; t < sample.tokens.size() && right; ++t) {
          const trie::Trie& trie = plan_.blocks[paths_[s][t].first].trie;
          const int32_t u = paths_[s][t].second;
          const auto position =
              sample.positions.empty() ? static_cast<int32_t>(t) : sample.positions[t];
          right = trie.tok[u] == sample.tokens[t] && trie.pos[u] == position;
        }
        expect(right, "sample ", s, ": its path does not spell it");
      }
    }
    for (size_t s = 0; s < seen.size(); ++s) {
      expect(seen[s] == 1, "sample ", s, ": ends in ", seen[s], " blocks");
    }
  }

  void check_edges() {
    std::set<Node> rows, edges;
    const trie::LogicalTokens& logical = plan_.logical;
    if (!expect(logical.offsets.size() == samples_.size() + 1, "logical: offsets")) return;
    for (size_t s = 0; s < samples_.size(); ++s) {
      int32_t u = logical.offsets[s];
      bool right = true;
      for (size_t t = 1; t < samples_[s].tokens.size() && right; ++t) {
        if (!samples_[s].scored.empty() && samples_[s].scored[t] == 0) continue;
        right = u < logical.offsets[s + 1] && right_edge(s, t, u);
        if (!right) break;
        rows.insert({logical.block[u], logical.row[u]});
        edges.insert({logical.block[u], logical.edge[u]});
        ++u;
      }
      expect(right && u == logical.offsets[s + 1], "sample ", s, ": logical tokens");
    }
    size_t num_rows = 0, num_edges = 0;
    for (size_t b = 0; b < plan_.blocks.size(); ++b) {
      const trie::Edges& e = plan_.blocks[b].edges;
      num_rows += e.source.size();
      num_edges += e.token.size();
      bool right = e.row_offsets.size() == e.source.size() + 1 && e.row_offsets[0] == 0 &&
                   e.row_offsets.back() == static_cast<int32_t>(e.token.size());
      for (size_t r = 0; r < e.source.size() && right; ++r) {
        right = e.source[r] >= plan_.blocks[b].num_carried &&
                (r == 0 || e.source[r - 1] < e.source[r]) &&
                e.row_offsets[r] < e.row_offsets[r + 1];
        for (int32_t x = e.row_offsets[r] + 1; x < e.row_offsets[r + 1]; ++x) {
          right = right && e.token[x - 1] < e.token[x];
        }
      }
      expect(right, "block ", b, ": edges");
    }
    expect(rows.size() == num_rows && edges.size() == num_edges, "edges that nobody reads");
  }

  bool right_edge(size_t s, size_t t, int32_t u) const {
    const trie::LogicalTokens& logical = plan_.logical;
    const Node source = paths_[s][t - 1];
    const int32_t row = logical.row[u];
    const int32_t edge = logical.edge[u];
    if (logical.block[u] != source.first || logical.position[u] != static_cast<int32_t>(t)) {
      return false;
    }
    const trie::Edges& edges = plan_.blocks[source.first].edges;
    return row >= 0 && row < static_cast<int32_t>(edges.source.size()) &&
           edges.source[row] == source.second && edges.row_offsets[row] <= edge &&
           edge < edges.row_offsets[row + 1] && edges.token[edge] == samples_[s].tokens[t];
  }

  // Rules 1 to 4 of A12 on the order of entries.
  void check_entries() {
    const auto size = static_cast<int32_t>(plan_.blocks.size());
    std::map<std::pair<Action, int32_t>, int32_t> at;
    for (size_t i = 0; i < plan_.entries.size(); ++i) {
      const Entry& entry = plan_.entries[i];
      expect(at.emplace(std::make_pair(entry.action, entry.block), static_cast<int32_t>(i)).second,
             "entry ",
             i,
             " comes twice");
    }
    std::vector<int32_t> close(size);
    for (int32_t b = size - 1; b >= 0; --b) {
      close[b] = b;
      for (int32_t later = b + 1; later < size; ++later) {
        for (const trie::Carried& from : plan_.blocks[later].carried) {
          if (from.block == b) close[b] = std::max(close[b], close[later]);
        }
      }
      expect(close[b] == plan_.blocks[b].close, "block ", b, ": close");
    }
    size_t wanted = 0;
    for (int32_t b = 0; b < size; ++b) {
      const Block& block = plan_.blocks[b];
      const auto when = [&](Action action) {
        const auto found = at.find({action, b});
        return found == at.end() ? -1 : found->second;
      };
      const int32_t forward = when(Action::kForward);
      const int32_t backward = when(Action::kBackward);
      const int32_t loss = when(Action::kLoss);
      const bool again = options_.for_backward && !block.offered.empty() &&
                         block.policy == CarryPolicy::kRecompute;
      bool right = forward >= 0 && (b == 0 || at[{Action::kForward, b - 1}] < forward);
      right = right && (loss >= 0) == !block.samples.empty() && (loss < 0 || forward < loss);
      right = right && (backward >= 0) == options_.for_backward;
      if (backward >= 0) {
        // After everything of its closing block, before the next forward.
        right = right && backward > at[{Action::kForward, close[b]}];
        if (close[b] + 1 < size) right = right && backward < at[{Action::kForward, close[b] + 1}];
        for (const trie::Carried& from : block.carried) {
          right = right && backward < at[{Action::kBackward, from.block}];
        }
      }
      right = right && when(Action::kRecompute) == (again ? backward - 1 : -1);
      expect(right, "block ", b, ": order of its entries");
      wanted += 1 + (loss >= 0 ? 1 : 0) + (options_.for_backward ? 1 : 0) + (again ? 1 : 0);
      for (const int32_t s : block.samples) {
        for (int32_t u = plan_.logical.offsets[s]; u < plan_.logical.offsets[s + 1]; ++u) {
          const int32_t q = plan_.logical.block[u];
          bool complete = at[{Action::kForward, q}] < loss;
          if (options_.for_backward) complete = complete && loss < at[{Action::kBackward, q}];
          expect(complete, "sample ", s, ": loss before its tokens or behind their backward");
        }
      }
    }
    expect(wanted == plan_.entries.size(), "entries: wanted ", wanted);
  }

  void check_totals() {
    int64_t own = 0, carried = 0, pairs = 0, recomputed = 0, logical = 0;
    for (const Block& block : plan_.blocks) {
      own += block.num_own();
      carried += block.num_carried;
      const bool again = !block.offered.empty() && block.policy == CarryPolicy::kRecompute;
      recomputed += again && options_.for_backward ? block.num_own() : 0;
      for (int32_t u = block.num_carried; u < block.trie.num_tokens(); ++u) {
        pairs += block.trie.dep[u] + 1;
      }
      logical += block.trie.num_logical;
    }
    int64_t tokens = 0;
    for (const Sample& sample : samples_) tokens += static_cast<int64_t>(sample.tokens.size());
    expect(own == plan_.num_computed && carried == plan_.num_carried && pairs == plan_.num_pairs &&
               recomputed == plan_.num_recomputed && logical == tokens &&
               plan_.num_logical == tokens &&
               plan_.num_unique == trie::build(samples_, options_.build).num_tokens() &&
               plan_.num_unique <= plan_.num_computed,
           "totals");
    if (options_.max_tokens_per_block > 0) {
      expect(peak_live_tokens(plan_) <= options_.max_tokens_per_block,
             "budget: ",
             peak_live_tokens(plan_),
             " live tokens of ",
             options_.max_tokens_per_block);
    }
  }

  const std::vector<Sample>& samples_;
  const trie::PlanOptions& options_;
  const Plan& plan_;
  std::vector<std::vector<Node>> paths_;
  std::vector<std::string> errors_;
};

}  // namespace

std::vector<std::string> plan_errors(const std::vector<Sample>& samples,
                                     const trie::PlanOptions& options,
                                     const trie::Plan& plan,
                                     bool uniform) {
  return Checker(samples, options, plan).run(uniform);
}

int64_t peak_live_tokens(const trie::Plan& plan) {
  int64_t live = 0, peak = 0;
  const bool backward = std::any_of(plan.entries.begin(), plan.entries.end(), [](const Entry& e) {
    return e.action == Action::kBackward;
  });
  for (const Entry& entry : plan.entries) {
    const Block& block = plan.blocks[entry.block];
    const bool kept = backward && !block.offered.empty() && block.policy == CarryPolicy::kRetain;
    const int64_t tokens = block.num_own();
    switch (entry.action) {
      case Action::kForward:
        peak = std::max(peak, live + tokens);
        live += kept ? tokens : 0;
        break;
      case Action::kRecompute:
        peak = std::max(peak, live + tokens);
        break;
      case Action::kBackward:
        live -= kept ? tokens : 0;
        break;
      case Action::kLoss:
        break;
    }
  }
  return peak;
}

}  // namespace banyan::testing
