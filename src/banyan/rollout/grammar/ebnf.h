// Reads a grammar in the notation of llama.cpp (GBNF) and XGrammar. Torch-free.
//
//   root   ::= item ("," item)*          rules in any order; `root` is the whole text
//   item   ::= "text" | 'text' | [a-z] | [^0-9] | . | (root) | item? item* item+ item{2} item{1,3}
//   # a comment; escapes \n \r \t \\ \" \' \] \- \^ \xHH \uHHHH \UHHHHHHHH
#pragma once

#include <string_view>

#include "banyan/rollout/grammar/network.h"

namespace banyan::rollout::grammar {

// Throws [grammar] with the line for what is not such a grammar.
Network read_ebnf(std::string_view text);

}  // namespace banyan::rollout::grammar
