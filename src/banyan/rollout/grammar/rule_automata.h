// The rules of a network, each made deterministic: nodes that have the same continuations are one,
// so that stacks of nodes to go back to do not differ without a reason. Torch-free.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "banyan/rollout/grammar/network.h"

namespace banyan::rollout::grammar {

struct RuleNode {
  int32_t rule = -1;
  bool is_final = false;
  bool is_merged = false;                          // another stands in its place
  std::vector<int32_t> next;                       // by class of a byte; empty: none; -1: none
  std::vector<std::pair<int32_t, int32_t>> calls;  // rule, node behind it
  // Nothing of the rule is left behind this node.
  bool is_last() const { return is_final && next.empty() && calls.empty(); }
};

struct RuleAutomata {
  std::array<uint8_t, 256> class_of{};  // bytes that no edge tells apart have one class
  int32_t num_classes = 0;
  std::vector<RuleNode> nodes;
  std::vector<int32_t> begin;  // by rule
  int32_t root = -1;           // rule
  // Rules that contain each other, themselves included, have one number.
  std::vector<int32_t> circle;
};

// Throws [grammar] for rules that are too large.
RuleAutomata determinise(const Network& network);

}  // namespace banyan::rollout::grammar
