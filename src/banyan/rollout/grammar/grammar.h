// Structured output by a grammar: EBNF text becomes a table over tokens. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {

// Any JSON object, containers at most kJsonDepth deep, at most one line end and 12 spaces between
// two tokens of JSON.
extern const std::string_view kJsonObject;
inline constexpr int32_t kJsonDepth = 5;

// A rule inside itself is followed as deep as the limits of size allow: 32, 16, 8, 4 or 2 times
// (`depth` > 0: that often or not at all); what stands last in its rule may come back any number of
// times. Every text of the table is one of the grammar. `token_bytes`: what each id writes. Throws
// [grammar] for text that is no grammar (grammar/ebnf.h), or one that is too large.
TokenTable compile_grammar(std::string_view ebnf,
                           const std::vector<std::string>& token_bytes,
                           int64_t max_bytes,
                           int32_t depth = 0);

}  // namespace banyan::rollout
