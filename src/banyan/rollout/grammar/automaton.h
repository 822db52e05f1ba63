// A network with its rules put into each other: a finite automaton over bytes. Torch-free.
//
// A state is a set of places; a place is a node of a rule with the stack of nodes to go back to.
// What stands last in its rule leaves nothing on the stack, so that "list ::= item | item list"
// goes on for ever; a rule inside itself is followed `depth` times, and deeper texts are left out.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "banyan/rollout/grammar/rule_automata.h"

namespace banyan::rollout::grammar {

struct AutomatonLimits {
  int32_t max_states = 20000;
  int32_t max_stacks = 200000;
  int64_t max_places = 5'000'000;  // looked at in all
};

struct ByteAutomaton {
  // States by the class of a byte: next[state * num_classes + class_of[byte]], -1 for none. State 0
  // is the start.
  std::array<uint8_t, 256> class_of{};
  int32_t num_classes = 0;
  std::vector<int32_t> next;
  std::vector<uint8_t> is_final;

  int32_t num_states() const { return static_cast<int32_t>(is_final.size()); }
  int32_t after(int32_t state, uint8_t byte) const {
    return next[static_cast<int64_t>(state) * num_classes + class_of[byte]];
  }
};

// None beyond the limits.
std::optional<ByteAutomaton> expand(const RuleAutomata& rules,
                                    int32_t depth,
                                    const AutomatonLimits& limits);

}  // namespace banyan::rollout::grammar
