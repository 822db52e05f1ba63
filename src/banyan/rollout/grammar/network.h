// A context-free grammar as a network: a small automaton for each rule, whose edges take a range of
// bytes, nothing, or everything that another rule writes. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace banyan::rollout::grammar {

struct Edge {
  enum class Kind : uint8_t { kNothing, kBytes, kRule };
  Kind kind = Kind::kNothing;
  uint8_t low = 0, high = 0;  // kBytes
  int32_t rule = -1;          // kRule
  int32_t to = -1;
};

struct Rule {
  std::string name;
  int32_t begin = -1;  // node; -1: named somewhere and not defined
  int32_t end = -1;    // no edge leaves it
};

// Part of a rule: what is written between two nodes.
struct Part {
  int32_t begin = -1;
  int32_t end = -1;
};

class Network {
 public:
  // Throws [grammar] beyond the limit of nodes.
  int32_t add_node();
  void add_edge(int32_t from, Edge edge) { edges_[from].push_back(edge); }
  void join(int32_t from, int32_t to) { add_edge(from, {.to = to}); }
  // One letter with a code point in one of the ranges, as UTF-8.
  Part add_letters(const std::vector<std::pair<uint32_t, uint32_t>>& ranges);

  int32_t num_nodes() const { return static_cast<int32_t>(edges_.size()); }
  const std::vector<Edge>& edges(int32_t node) const { return edges_[node]; }

  std::vector<Rule> rules;
  int32_t root = -1;

 private:
  // Texts of `count` bytes from `low` to `high`, continuation bytes running over 80..BF.
  void add_bytes(int32_t from, int32_t to, const uint8_t* low, const uint8_t* high, int32_t count);

  std::vector<std::vector<Edge>> edges_;
};

}  // namespace banyan::rollout::grammar
