// Layout: samples arrive in depth-first order, so each one appends the tokens that it does not
// share with its predecessor. `chain` holds the packed index of every token of the current path;
// what falls off it when the next sample starts is a closed subtree. Segments follow from m, the
// number of samples through each token: m is constant along a chain and drops exactly at a fork or
// behind the end of a sample.
#include "banyan/trie/trie.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/trie/detail/order.h"

namespace banyan::trie {
namespace {

void append_paths(Trie& trie,
                  std::vector<int32_t>& members,
                  const std::vector<Sample>& samples,
                  const detail::Order& order,
                  int32_t begin,
                  int32_t end) {
  std::vector<int32_t> chain;
  for (int32_t i = begin; i < end; ++i) {
    const Sample& sample = samples[order.samples[i]];
    const size_t length = sample.tokens.size();
    const size_t kept = i == begin ? 0 : order.shared[i];
    for (size_t d = kept; d < chain.size(); ++d) trie.tout[chain[d]] = trie.num_tokens();
    chain.resize(length);
    for (size_t d = kept; d < length; ++d) {
      chain[d] = trie.num_tokens();
      trie.tok.push_back(sample.tokens[d]);
      trie.pos.push_back(sample.positions.empty() ? static_cast<int32_t>(d) : sample.positions[d]);
      trie.dep.push_back(static_cast<int32_t>(d));
      trie.par.push_back(d == 0 ? -1 : chain[d - 1]);
      trie.tout.push_back(0);
      members.push_back(0);
    }
    members[chain[length - 1]] += 1;
    trie.sample_end.push_back(chain[length - 1]);
    trie.num_logical += static_cast<int64_t>(length);
  }
  for (const int32_t token : chain) trie.tout[token] = trie.num_tokens();
  for (int32_t u = trie.num_tokens() - 1; u >= 0; --u) {
    if (trie.par[u] >= 0) members[trie.par[u]] += members[u];
  }
}

void cut_segments(Trie& trie, const std::vector<int32_t>& members) {
  trie.seg.resize(trie.tok.size());
  for (int32_t u = 0; u < trie.num_tokens(); ++u) {
    const int32_t parent = trie.par[u];
    if (parent < 0 || members[u] != members[parent]) {
      const int32_t above = parent < 0 ? -1 : trie.seg[parent];
      trie.segments.push_back({u, u, trie.tout[u], above, members[u], trie.dep[u]});
    }
    trie.seg[u] = trie.num_segments() - 1;
    trie.segments.back().end = u + 1;
  }
}

}  // namespace

namespace detail {

void list_ancestors(Trie& trie) {
  trie.ancestor_offsets.assign(1, 0);
  for (const Segment& segment : trie.segments) {
    if (segment.parent >= 0) {
      const int32_t first = trie.ancestor_offsets[segment.parent];
      const int32_t last = trie.ancestor_offsets[segment.parent + 1];
      for (int32_t i = first; i < last; ++i) {
        const Range above = trie.ancestors[i];
        trie.ancestors.push_back(above);
      }
      const Segment& parent = trie.segments[segment.parent];
      trie.ancestors.push_back({parent.begin, parent.end});
    }
    trie.ancestor_offsets.push_back(static_cast<int32_t>(trie.ancestors.size()));
  }
}

Trie pack(const std::vector<Sample>& samples, const Order& order, int32_t begin, int32_t end) {
  Trie trie;
  size_t tokens = 0;
  for (int32_t i = begin; i < end; ++i) {
    tokens += samples[order.samples[i]].tokens.size() - (i == begin ? 0 : order.shared[i]);
  }
  for (auto* array : {&trie.tok, &trie.pos, &trie.dep, &trie.par, &trie.tout})
    array->reserve(tokens);
  std::vector<int32_t> members;
  members.reserve(tokens);
  append_paths(trie, members, samples, order, begin, end);
  cut_segments(trie, members);
  list_ancestors(trie);
  return trie;
}

}  // namespace detail

std::vector<int32_t> Trie::path(int32_t sample) const {
  int32_t token = sample_end[sample];
  std::vector<int32_t> out(dep[token] + 1);
  for (size_t i = out.size(); i > 0; --i, token = par[token]) out[i - 1] = token;
  return out;
}

int64_t Trie::num_pairs() const {
  int64_t pairs = 0;
  for (const int32_t depth : dep) pairs += depth + 1;
  return pairs;
}

Trie build(const std::vector<Sample>& samples, const BuildOptions& options) {
  const detail::Order order = detail::order_samples(samples, options);
  Trie trie = detail::pack(samples, order, 0, static_cast<int32_t>(samples.size()));
  std::vector<int32_t> in_input_order(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) in_input_order[order.samples[i]] = trie.sample_end[i];
  trie.sample_end = std::move(in_input_order);
  return trie;
}

}  // namespace banyan::trie
