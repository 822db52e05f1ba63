#include "banyan/rollout/grammar/grammar.h"

#include <optional>

#include "banyan/core/error.h"
#include "banyan/rollout/grammar/automaton.h"
#include "banyan/rollout/grammar/ebnf.h"
#include "banyan/rollout/grammar/token_walk.h"

namespace banyan::rollout {

const std::string_view kJsonObject = R"(
root   ::= object
object ::= "{" ws (string ws ":" " "? (scalar | object | array) ws
  ("," ws string ws ":" " "? (scalar | object | array) ws)*)? "}"
array  ::= "[" ws ((scalar | object | array) ws ("," ws (scalar | object | array) ws)*)? "]"
scalar ::= string | number | "true" | "false" | "null"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws     ::= (" " | "\n" " "{0,12})?
)";

TokenTable compile_grammar(std::string_view ebnf,
                           const std::vector<std::string>& token_bytes,
                           int64_t max_bytes,
                           int32_t depth) {
  const grammar::RuleAutomata rules = grammar::determinise(grammar::read_ebnf(ebnf));
  const std::vector<int32_t> depths = depth > 0 ? std::vector{depth} : std::vector{32, 16, 8, 4, 2};
  for (const int32_t tried : depths) {
    const auto automaton = grammar::expand(rules, tried, {});
    if (!automaton) continue;
    auto table = grammar::walk_tokens(*automaton, token_bytes, max_bytes);
    if (table) return std::move(*table);
  }
  detail::throw_value_error(detail::concat(
      "[grammar] wanted a grammar whose table takes at most ", max_bytes >> 20, " MB"));
}

}  // namespace banyan::rollout
