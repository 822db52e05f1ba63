// An automaton over bytes as a table over tokens. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "banyan/rollout/grammar/automaton.h"
#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout::grammar {

// `token_bytes`: what each id writes; an id that writes nothing is never allowed. States from which
// no tokens lead to an end are left out. None if the table takes more than max_bytes; throws
// [grammar] if the tokens cannot write any of the texts.
std::optional<TokenTable> walk_tokens(const ByteAutomaton& automaton,
                                      const std::vector<std::string>& token_bytes,
                                      int64_t max_bytes);

}  // namespace banyan::rollout::grammar
