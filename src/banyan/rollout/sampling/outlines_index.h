// Reads the automaton that outlines_core 0.2 compiles, in the form in which it serialises itself.
// Torch-free.
//
// Layout (bincode 2 of its struct Index): initial state; final states as a count and that many
// states; transitions as a count of states, each a state, a count and that many (token, target);
// the end token; the size of the vocabulary. Every number is a varint: a byte below 251 is itself;
// 251, 252 and 253 announce 2, 4 and 8 bytes, little endian.
#pragma once

#include <cstdint>
#include <string_view>

#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {

// Transitions by `end_token` are left out: a final state says as much. States are numbered by a
// breadth-first walk from the initial one. Throws [token_table] if the bytes are not such an
// automaton, or the table would take more than max_bytes.
TokenTable read_outlines_index(std::string_view bytes, int32_t end_token, int64_t max_bytes);

}  // namespace banyan::rollout
