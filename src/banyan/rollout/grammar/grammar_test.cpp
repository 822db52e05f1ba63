// Grammars: what a table of single bytes accepts, what longer tokens do, what is refused.
#include "banyan/rollout/grammar/grammar.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace banyan::rollout {
namespace {

constexpr int64_t kBytes = 64 << 20;

std::vector<std::string> bytes_and(const std::vector<std::string>& more) {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

TokenTable compiled(std::string_view ebnf, const std::vector<std::string>& more = {}) {
  return compile_grammar(ebnf, bytes_and(more), kBytes);
}

bool accepts(const TokenTable& table, std::string_view text) {
  int32_t state = table.start();
  for (const char byte : text) {
    state = table.next(state, static_cast<uint8_t>(byte));
    if (state < 0) return false;
  }
  return table.is_final(state);
}

std::string error_of(std::string_view ebnf) {
  try {
    compiled(ebnf);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

std::string nested(int depth, const std::string& open, const std::string& close) {
  std::string text;
  for (int i = 0; i < depth; ++i) text += open;
  for (int i = 0; i < depth; ++i) text += close;
  return text;
}

struct Case {
  const char* ebnf;
  std::vector<std::string> yes, no;
};

TEST(Grammar, TextsOfEachNotation) {
  const std::vector<Case> cases = {
      {"root ::= \"a\" 'b' [c-e]", {"abc", "abe"}, {"", "ab", "abf", "abcc"}},
      {"root ::= \"a\"* \"b\"+ \"c\"?", {"b", "aabbc"}, {"", "a", "ac", "bcc"}},
      {"root ::= [0-9]{2}", {"12"}, {"1", "123"}},
      {"root ::= [0-9]{2,}", {"12", "1234567"}, {"1"}},
      {"root ::= [0-9]{0,2} | \"x\"", {"", "1", "12", "x"}, {"123", "1x"}},
      {"root ::= (\"a\" | \"b\" \"c\"){2}", {"aa", "abc", "bcbc"}, {"a", "aaa", "ab"}},
      {"root ::= [^a\\]-]", {"b", "é", "\n"}, {"a", "]", "-", "\xc3", "\xff"}},
      {"root ::= .", {"a", "é", "漢", "🌍"}, {"", "ab", "\xed\xa0\x80", "\xf4\x90\x80\x80"}},
      {"root ::= [à-ü]", {"à", "é", "ü"}, {"a", "ß", "ý"}},
      {"root ::= \"\\x41\\u00e9\\n\\\"\"", {"Aé\n\""}, {"A"}},
      {"# first\nroot ::= one | # or\n  two\none ::= \"1\"\ntwo-b ::= \"2\"\ntwo ::= two-b",
       {"1", "2"},
       {"12"}},
      {"root ::= \"\" | \"a\"", {"", "a"}, {"b"}},
      {"root::=\"a\"  ( )  \"b\"", {"ab"}, {"a"}},
  };
  for (const Case& one : cases) {
    const TokenTable table = compiled(one.ebnf);
    for (const std::string& text : one.yes) EXPECT_TRUE(accepts(table, text)) << one.ebnf << text;
    for (const std::string& text : one.no) EXPECT_FALSE(accepts(table, text)) << one.ebnf << text;
  }
}

TEST(Grammar, WhatStandsLastComesBackForEver) {
  for (const char* ebnf : {"root ::= \"a\" | \"a\" \",\" root",
                           "root ::= list\nlist ::= item (\",\" list)?\nitem ::= \"a\""}) {
    const TokenTable table = compiled(ebnf);
    std::string text = "a";
    for (int i = 0; i < 500; ++i) text += ",a";
    EXPECT_TRUE(accepts(table, text));
    EXPECT_FALSE(accepts(table, text + ","));
    EXPECT_LE(table.num_states(), 4);
  }
}

TEST(Grammar, ARuleInsideItselfHasADepth) {
  const TokenTable table =
      compiled("root ::= sum\nsum ::= term (\"+\" term)*\nterm ::= [0-9]+ | \"(\" sum \")\"");
  EXPECT_TRUE(accepts(table, "12+(3+(4))+5"));
  EXPECT_TRUE(accepts(table, nested(8, "(1+", ")").insert(24, "2")));
  EXPECT_FALSE(accepts(table, nested(40, "(", ")").insert(40, "2")));
  EXPECT_FALSE(accepts(table, "(1"));
  EXPECT_FALSE(accepts(table, "1)"));
}

TEST(Grammar, LeftRecursionEnds) {
  const TokenTable table = compiled("root ::= root \"+\" [0-9] | root \"-\" [0-9] | [0-9]");
  EXPECT_TRUE(accepts(table, "1"));
  EXPECT_TRUE(accepts(table, "1+2-3"));
  EXPECT_FALSE(accepts(table, "1+"));
  EXPECT_TRUE(accepts(compiled("root ::= root | root root | \"a\""), "aaa"));
}

TEST(Grammar, JsonObjects) {
  const TokenTable table = compile_grammar(kJsonObject, bytes_and({}), kBytes, kJsonDepth - 1);
  for (const char* text : {"{}",
                           "{\"a\": 1}",
                           R"({"a": -0.5e+3, "b": [true, null, "x\n\u00e9\""], "": {"c": {}}})",
                           "{\n  \"a\": [\n    1,\n    2\n  ]\n}",
                           R"({"a":{"b":{"c":{"d":{"e":1}}}}})",
                           R"({"a":[[[[1]]]]})",
                           "{\"é\": \"漢字🌍\"}"}) {
    EXPECT_TRUE(accepts(table, text)) << text;
  }
  for (const char* text : {"",
                           "[]",
                           "1",
                           "{",
                           "{\"a\"}",
                           "{\"a\": 1,}",
                           "{\"a\": 01}",
                           "{\"a\": .5}",
                           "{\"a\": tru}",
                           "{a: 1}",
                           "{\"a\": 1} ",
                           "{\"a\": \"\n\"}",
                           "{\"a\": [1}",
                           R"({"a":{"b":{"c":{"d":{"e":{}}}}}})"}) {
    EXPECT_FALSE(accepts(table, text)) << text;
  }
}

TEST(Grammar, TokensAreWalkedAsTheirBytes) {
  enum : int32_t { kAb = 256, kAbc, kB, kNothing, kAbToo };
  const TokenTable table = compiled("root ::= \"ab\" \"c\"? \"!\"", {"ab", "abc", "b!", "", "ab"});
  EXPECT_EQ(std::vector<int32_t>(table.begin(0), table.end(0)),
            (std::vector<int32_t>{'a', kAb, kAbc, kAbToo}));
  EXPECT_EQ(table.next(0, kAb), table.next(0, kAbToo));
  EXPECT_EQ(table.next(table.next(0, kAb), 'c'), table.next(0, kAbc));
  EXPECT_TRUE(table.is_final(table.next(table.next(0, 'a'), kB)));
  EXPECT_EQ(table.next(0, kNothing), -1);
}

TEST(Grammar, WhatTheTokensCannotEndIsLeftOut) {
  const std::vector<std::string> tokens = {"a", "b", "c"};
  const TokenTable table = compile_grammar("root ::= \"ab\" | \"ac!\" | \"b\"", tokens, kBytes);
  EXPECT_EQ(table.next(table.next(0, 0), 1), table.next(0, 1));
  EXPECT_EQ(table.next(table.next(0, 0), 2), -1);  // no token writes '!'
  EXPECT_THROW(compile_grammar("root ::= \"x\"", tokens, kBytes), std::invalid_argument);
}

TEST(Grammar, RefusalsNameTheLine) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"", "wanted a rule root"},
      {"start: \"a\"", "[grammar] line 1: wanted a rule (name ::= ...), got 'start: \"a\"'"},
      {"rule ::= \"a\"", "wanted a rule root"},
      {"root ::= other", "wanted a rule 'other', got none"},
      {"root ::= \"a\"\nroot ::= \"b\"", "line 2: wanted each rule once"},
      {"root ::= \"a", "line 1: wanted the end of the text in quotes, got the end"},
      {"root ::= (\"a\"", "wanted ')', got the end"},
      {"root ::= \"a\")", "wanted a rule or its end, got ')'"},
      {"root ::= [a", "wanted ']'"},
      {"root ::= [b-a]", "wanted a range that ascends"},
      {"root ::= \"\\q\"", "wanted an escape"},
      {"root ::= \"\\xg0\"", "wanted a hexadecimal digit"},
      {"root ::= \"\\uD800\"", "wanted a letter of Unicode"},
      {"root ::= \"\xff\"", "wanted UTF-8"},
      {"root ::= \"a\"{3,2}", "wanted {m}, {m,} or {m,n}"},
      {"root ::= \"a\"{9999}", "wanted a count of at most 4096"},
      {"root ::= (=\"a\") \"a\"", "wanted no look-ahead"},
      {"root ::= ((\"a\"{4096}){4096}){4096}", "wanted a smaller grammar"},
      {"root ::= \"(\" root \")\"", "wanted a text that the model's tokens can write"},
      {"root ::= ([a-z]* \"x\" [a-z]{40}) | ([a-z]* \"y\" [a-z]{40})", "wanted"},
  };
  for (const auto& [ebnf, text] : cases) {
    EXPECT_NE(error_of(ebnf).find(text), std::string::npos) << ebnf << ": " << error_of(ebnf);
  }
  EXPECT_NE(error_of("root ::= " + std::string(100, '(') + "\"a\"").find("64 deep"),
            std::string::npos);
}

}  // namespace
}  // namespace banyan::rollout
