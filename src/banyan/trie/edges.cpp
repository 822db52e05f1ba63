// Scored edges of a packed trie. A token is *wanted* when some sample scores it; its edge belongs
// to the head row of its parent. Children of one parent stand in ascending token order, so equal
// tokens under one parent (different positions, or nodes below min_group_size) are neighbours and
// become one edge.
#include "banyan/trie/detail/edges.h"

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

}  // namespace

namespace detail {

Edges edges_of(const Trie& trie, const std::vector<const Sample*>& samples) {
  BANYAN_ASSERT(samples.size() == trie.sample_end.size(), "edges_of: samples of another trie");
  std::vector<uint8_t> wanted(trie.tok.size(), 0);
  size_t num_scored = 0;
  for (size_t s = 0; s < samples.size(); ++s) {
    int32_t token = trie.sample_end[s];
    BANYAN_ASSERT(trie.dep[token] + 1 == static_cast<int32_t>(samples[s]->tokens.size()),
                  "edges_of: samples of another trie");
    for (size_t t = samples[s]->tokens.size(); t > 0; --t, token = trie.par[token]) {
      if (!is_scored(*samples[s], t - 1)) continue;
      wanted[token] = 1;
      ++num_scored;
    }
  }
  Edges edges;
  const std::vector<int32_t> edge = make_rows(trie, wanted, edges);
  std::vector<int32_t> row(trie.tok.size(), -1);
  for (size_t r = 0; r < edges.source.size(); ++r) row[edges.source[r]] = static_cast<int32_t>(r);

  for (auto* array :
       {&edges.logical_edge, &edges.logical_row, &edges.logical_sample, &edges.logical_position}) {
    array->resize(num_scored);
  }
  edges.logical_offsets.assign(1, 0);
  int32_t next = 0;
  for (size_t s = 0; s < samples.size(); ++s) {
    const Sample& sample = *samples[s];
    int32_t count = 0;
    for (size_t t = 1; t < sample.tokens.size(); ++t) count += is_scored(sample, t) ? 1 : 0;
    int32_t token = trie.sample_end[s];
    int32_t at = next + count;
    for (size_t t = sample.tokens.size(); t > 0; --t, token = trie.par[token]) {
      if (!is_scored(sample, t - 1)) continue;
      --at;
      edges.logical_edge[at] = edge[token];
      edges.logical_row[at] = row[trie.par[token]];
      edges.logical_sample[at] = static_cast<int32_t>(s);
      edges.logical_position[at] = static_cast<int32_t>(t - 1);
    }
    next += count;
    edges.logical_offsets.push_back(next);
  }
  return edges;
}

}  // namespace detail

Edges edges_of(const Trie& trie, const std::vector<Sample>& samples) {
  std::vector<const Sample*> pointers;
  for (const Sample& sample : samples) pointers.push_back(&sample);
  return detail::edges_of(trie, pointers);
}

}  // namespace banyan::trie
