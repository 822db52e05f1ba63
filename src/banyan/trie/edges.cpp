// Scored edges of a packed trie. A token is *wanted* when some sample scores it; its edge belongs
// to the head row of its parent. Children of one parent stand in ascending token order, so equal
// tokens under one parent (different positions, or nodes below min_group_size) are neighbours and
// become one edge.
#include "banyan/core/error.h"
#include "banyan/trie/plan.h"

namespace banyan::trie {
namespace {

bool is_scored(const Sample& sample, size_t t) {
  return t > 0 && (sample.scored.empty() || sample.scored[t] != 0);
}

// Fills rows and edges; returns the edge of every wanted token.
std::vector<int32_t> make_rows(const Trie& trie, const std::vector<uint8_t>& wanted, Edges& edges) {
  const int32_t num_tokens = trie.num_tokens();
  std::vector<int32_t> fan_out(num_tokens, 0);
  std::vector<int32_t> newest(num_tokens, -1);  // the newest wanted child of each parent
  const auto is_new = [&](int32_t u) {
    const int32_t last = newest[trie.par[u]];
    return last < 0 || trie.tok[last] != trie.tok[u];
  };
  for (int32_t u = 0; u < num_tokens; ++u) {
    if (!wanted[u]) continue;
    fan_out[trie.par[u]] += is_new(u) ? 1 : 0;
    newest[trie.par[u]] = u;
  }
  std::vector<int32_t> next(num_tokens, 0);  // first edge not yet given out, per parent
  edges.row_offsets.assign(1, 0);
  for (int32_t u = 0; u < num_tokens; ++u) {
    if (fan_out[u] == 0) continue;
    next[u] = edges.row_offsets.back();
    edges.source.push_back(u);
    edges.row_offsets.push_back(next[u] + fan_out[u]);
  }
  newest.assign(num_tokens, -1);
  edges.token.resize(edges.row_offsets.back());
  std::vector<int32_t> edge(num_tokens, -1);
  for (int32_t u = 0; u < num_tokens; ++u) {
    if (!wanted[u]) continue;
    const int32_t parent = trie.par[u];
    edge[u] = is_new(u) ? next[parent]++ : edge[newest[parent]];
    edges.token[edge[u]] = trie.tok[u];
    newest[parent] = u;
  }
  return edge;
}

// Calls visit(sample, t, token) for every scored token, sample by sample, last token first.
template <typename Visit>
void for_each_scored(const Trie& trie, const std::vector<Sample>& samples, Visit visit) {
  for (size_t s = 0; s < samples.size(); ++s) {
    int32_t token = trie.sample_end[s];
    for (size_t t = samples[s].tokens.size(); t > 0; --t, token = trie.par[token]) {
      if (is_scored(samples[s], t - 1)) visit(s, t - 1, token);
    }
  }
}

LogicalTokens make_logical(const Trie& trie,
                           const std::vector<Sample>& samples,
                           const Edges& edges,
                           const std::vector<int32_t>& edge) {
  std::vector<int32_t> row(trie.tok.size(), -1);
  for (size_t r = 0; r < edges.source.size(); ++r) row[edges.source[r]] = static_cast<int32_t>(r);
  LogicalTokens logical;
  logical.offsets.assign(1, 0);
  for (const Sample& sample : samples) {
    int32_t count = 0;
    for (size_t t = 1; t < sample.tokens.size(); ++t) count += is_scored(sample, t) ? 1 : 0;
    logical.offsets.push_back(logical.offsets.back() + count);
  }
  logical.block.assign(logical.offsets.back(), 0);
  logical.edge.resize(logical.offsets.back());
  logical.row.resize(logical.offsets.back());
  logical.position.resize(logical.offsets.back());
  std::vector<int32_t> next(logical.offsets.begin() + 1, logical.offsets.end());
  for_each_scored(trie, samples, [&](size_t s, size_t t, int32_t token) {
    const int32_t u = --next[s];
    logical.edge[u] = edge[token];
    logical.row[u] = row[trie.par[token]];
    logical.position[u] = static_cast<int32_t>(t);
  });
  return logical;
}

}  // namespace

Edges edges_of(const Trie& trie, const std::vector<Sample>& samples, LogicalTokens* logical) {
  BANYAN_ASSERT(samples.size() == trie.sample_end.size(), "edges_of: samples of another trie");
  for (size_t s = 0; s < samples.size(); ++s) {
    BANYAN_ASSERT(
        trie.dep[trie.sample_end[s]] + 1 == static_cast<int32_t>(samples[s].tokens.size()),
        "edges_of: samples of another trie");
  }
  std::vector<uint8_t> wanted(trie.tok.size(), 0);
  for_each_scored(trie, samples, [&](size_t, size_t, int32_t token) { wanted[token] = 1; });
  Edges edges;
  const std::vector<int32_t> edge = make_rows(trie, wanted, edges);
  if (logical != nullptr) *logical = make_logical(trie, samples, edges, edge);
  return edges;
}

}  // namespace banyan::trie
