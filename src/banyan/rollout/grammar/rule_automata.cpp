// The subset construction, where another rule counts as one more letter.
#include "banyan/rollout/grammar/rule_automata.h"

#include <algorithm>
#include <map>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::rollout::grammar {
namespace {

constexpr int32_t kMaxNodes = 50000;
constexpr int32_t kMaxRounds = 32;         // of merging
constexpr int64_t kMaxSteps = 20'000'000;  // over edges

using Nodes = std::vector<int32_t>;

std::array<uint8_t, 256> byte_classes(const Network& network) {
  std::array<bool, 257> begins{};
  for (int32_t node = 0; node < network.num_nodes(); ++node) {
    for (const Edge& edge : network.edges(node)) {
      if (edge.kind == Edge::Kind::kBytes) begins[edge.low] = begins[edge.high + 1] = true;
    }
  }
  std::array<uint8_t, 256> found{};
  for (int32_t byte = 1; byte < 256; ++byte) {
    found[byte] = static_cast<uint8_t>(found[byte - 1] + (begins[byte] ? 1 : 0));
  }
  return found;
}

class Builder {
 public:
  explicit Builder(const Network& network)
      : network_(network), seen_(static_cast<size_t>(network.num_nodes()), 0) {
    out_.class_of = byte_classes(network);
    out_.num_classes = out_.class_of[255] + 1;
    out_.root = network.root;
  }

  RuleAutomata build() {
    for (int32_t rule = 0; rule < static_cast<int32_t>(network_.rules.size()); ++rule) add(rule);
    for (int32_t round = 0; round < kMaxRounds && merge_equal(); ++round) {
    }
    number_circles();
    return std::move(out_);
  }

 private:
  void add(int32_t rule) {
    ids_.clear();
    sets_.clear();
    rule_ = rule;
    const auto first = static_cast<int32_t>(out_.nodes.size());
    out_.begin.push_back(id_of({network_.rules[rule].begin}));
    for (size_t i = 0; i < sets_.size(); ++i) {
      const Nodes set = sets_[i];  // sets_ grows
      fill(first + static_cast<int32_t>(i), set);
    }
  }

  // The node for what can be done from these, by edges that take nothing.
  int32_t id_of(Nodes nodes) {
    Nodes kept;
    ++mark_;
    for (const int32_t node : nodes) seen_[node] = mark_;
    while (!nodes.empty()) {
      const int32_t node = nodes.back();
      nodes.pop_back();
      bool matters = node == network_.rules[rule_].end;
      for (const Edge& edge : network_.edges(node)) {
        BANYAN_CHECK(++steps_ <= kMaxSteps, "[grammar] wanted smaller rules");
        matters = matters || edge.kind != Edge::Kind::kNothing;
        if (edge.kind == Edge::Kind::kNothing && seen_[edge.to] != mark_) {
          seen_[edge.to] = mark_;
          nodes.push_back(edge.to);
        }
      }
      if (matters) kept.push_back(node);
    }
    std::sort(kept.begin(), kept.end());
    const auto [found, is_new] = ids_.emplace(kept, static_cast<int32_t>(out_.nodes.size()));
    if (is_new) {
      BANYAN_CHECK(out_.nodes.size() < kMaxNodes, "[grammar] wanted smaller rules");
      out_.nodes.emplace_back().rule = rule_;
      sets_.push_back(std::move(kept));
    }
    return found->second;
  }

  void fill(int32_t id, const Nodes& set) {
    std::map<int32_t, Nodes> by_class, by_rule;
    for (const int32_t node : set) {
      if (node == network_.rules[rule_].end) out_.nodes[id].is_final = true;
      for (const Edge& edge : network_.edges(node)) {
        if (edge.kind == Edge::Kind::kRule) by_rule[edge.rule].push_back(edge.to);
        if (edge.kind != Edge::Kind::kBytes) continue;
        for (int32_t c = out_.class_of[edge.low]; c <= out_.class_of[edge.high]; ++c) {
          by_class[c].push_back(edge.to);
        }
      }
    }
    std::vector<int32_t> next;
    if (!by_class.empty()) next.assign(static_cast<size_t>(out_.num_classes), -1);
    for (auto& [c, targets] : by_class) next[c] = id_of(std::move(targets));
    std::vector<std::pair<int32_t, int32_t>> calls;
    for (auto& [rule, targets] : by_rule) calls.emplace_back(rule, id_of(std::move(targets)));
    out_.nodes[id].next = std::move(next);
    out_.nodes[id].calls = std::move(calls);
  }

  // Puts the first of all nodes that do the same in the place of the others; from the ends of the
  // rules backwards, one step a round. Whether there were any.
  bool merge_equal() {
    std::map<std::vector<int32_t>, int32_t> first;
    std::vector<int32_t> same(out_.nodes.size());
    bool is_changed = false;
    for (size_t id = 0; id < same.size(); ++id) {
      const RuleNode& node = out_.nodes[id];
      std::vector<int32_t> key = {node.rule, node.is_final ? 1 : 0, node.next.empty() ? 1 : 0};
      key.insert(key.end(), node.next.begin(), node.next.end());
      for (const auto& [rule, to] : node.calls) key.insert(key.end(), {rule, to});
      same[id] = first.emplace(std::move(key), static_cast<int32_t>(id)).first->second;
      is_changed = is_changed || (same[id] != static_cast<int32_t>(id) && !node.is_merged);
    }
    for (size_t id = 0; id < same.size(); ++id) {
      RuleNode& node = out_.nodes[id];
      node.is_merged = same[id] != static_cast<int32_t>(id);
      for (int32_t& to : node.next) to = to < 0 ? -1 : same[to];
      for (auto& [rule, to] : node.calls) to = same[to];
    }
    for (int32_t& begin : out_.begin) begin = same[begin];
    return is_changed;
  }

  // Two rules share a number if each is reached from the other.
  void number_circles() {
    const size_t count = network_.rules.size();
    std::vector<std::vector<int32_t>> calls(count);
    for (const RuleNode& node : out_.nodes) {
      for (const auto& [rule, to] : node.calls) calls[node.rule].push_back(rule);
    }
    BANYAN_CHECK(count <= 2000, "[grammar] wanted at most 2000 rules, got ", count);
    std::vector<std::vector<uint8_t>> reaches(count, std::vector<uint8_t>(count, 0));
    for (size_t from = 0; from < count; ++from) {
      std::vector<int32_t> open = calls[from];
      while (!open.empty()) {
        const int32_t rule = open.back();
        open.pop_back();
        if (std::exchange(reaches[from][rule], 1) != 0) continue;
        open.insert(open.end(), calls[rule].begin(), calls[rule].end());
      }
    }
    out_.circle.assign(count, -1);
    for (size_t a = 0; a < count; ++a) {
      if (out_.circle[a] >= 0) continue;
      for (size_t b = a; b < count; ++b) {
        if (a == b || (reaches[a][b] != 0 && reaches[b][a] != 0)) {
          out_.circle[b] = static_cast<int32_t>(a);
        }
      }
    }
  }

  const Network& network_;
  RuleAutomata out_;
  std::map<Nodes, int32_t> ids_;  // of this rule
  std::vector<Nodes> sets_;
  std::vector<int32_t> seen_;  // the last mark of each node
  int32_t mark_ = 0;
  int32_t rule_ = 0;
  int64_t steps_ = 0;
};

}  // namespace

RuleAutomata determinise(const Network& network) { return Builder(network).build(); }

}  // namespace banyan::rollout::grammar
