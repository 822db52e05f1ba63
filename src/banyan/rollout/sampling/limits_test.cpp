// Every row of the table, and what is checked beyond it.
#include "banyan/rollout/sampling/limits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>

#include "banyan/rollout/sampling/outlines_index.h"
#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {
namespace {

SamplingParams fine() {
  SamplingParams params;
  params.max_tokens = 10;
  return params;
}

// The text of the refusal, or nothing.
std::string refusal(const SamplingParams& params, int32_t n = 1, int64_t num_known = 90) {
  try {
    check_sampling(params, n, /*vocab=*/100, num_known);
  } catch (const RequestError& error) {
    EXPECT_EQ(error.code, 400);
    EXPECT_FALSE(error.param.empty());
    EXPECT_EQ(std::string(error.what()).rfind("[rollout] " + error.param, 0), 0u) << error.what();
    return error.what();
  }
  return "";
}

using Set = std::function<void(SamplingParams&, double)>;
const std::map<std::string, Set>& setters() {
  static const std::map<std::string, Set> map = {
      {"temperature", [](auto& p, double v) { p.temperature = v; }},
      {"top_p", [](auto& p, double v) { p.top_p = v; }},
      {"top_k", [](auto& p, double v) { p.top_k = static_cast<int32_t>(v); }},
      {"min_p", [](auto& p, double v) { p.min_p = v; }},
      {"repetition_penalty", [](auto& p, double v) { p.repetition_penalty = v; }},
      {"presence_penalty", [](auto& p, double v) { p.presence_penalty = v; }},
      {"frequency_penalty", [](auto& p, double v) { p.frequency_penalty = v; }},
      {"max_tokens",
       [](auto& p, double v) {
         p.max_tokens = static_cast<int32_t>(v);
         p.prompt_logprobs = 0;
       }},
      {"min_tokens",
       [](auto& p, double v) {
         p.min_tokens = static_cast<int32_t>(v);
         p.max_tokens = 1 << 30;
       }},
      {"top_logprobs", [](auto& p, double v) { p.top_logprobs = static_cast<int32_t>(v); }},
      {"prompt_logprobs", [](auto& p, double v) { p.prompt_logprobs = static_cast<int32_t>(v); }},
      {"logprob_token_ids.count",
       [](auto& p, double v) { p.logprob_token_ids.assign(static_cast<size_t>(v), 1); }},
      {"bad_words.count",
       [](auto& p, double v) { p.bad_words.assign(static_cast<size_t>(v), {1}); }},
      {"stop_token_ids.count",
       [](auto& p, double v) { p.stop_token_ids.assign(static_cast<size_t>(v), 1); }},
      {"stop.count", [](auto& p, double v) { p.stop.assign(static_cast<size_t>(v), "x"); }},
      {"stop.bytes",
       [](auto& p, double v) { p.stop = {std::string(static_cast<size_t>(v), 'x')}; }},
      {"repetition_detection.max_pattern",
       [](auto& p, double v) { p.repetition_detection.max_pattern = static_cast<int32_t>(v); }},
      {"repetition_detection.min_pattern",
       [](auto& p, double v) {
         p.repetition_detection = {.max_pattern = 1024, .min_pattern = static_cast<int32_t>(v)};
       }},
      {"repetition_detection.min_count",
       [](auto& p, double v) {
         p.repetition_detection = {.max_pattern = 1, .min_count = static_cast<int32_t>(v)};
       }},
  };
  return map;
}

TEST(SamplingLimits, EveryRowHoldsAtItsEnds) {
  for (const Limit& limit : sampling_limits()) {
    const auto found = setters().find(limit.name);
    if (found == setters().end()) continue;
    const auto try_value = [&](double value) {
      SamplingParams params = fine();
      found->second(params, value);
      return refusal(params);
    };
    const double step = limit.integer ? 1.0 : 1e-9;
    const bool counts_only = limit.engine.low == 0 && std::string(limit.name).ends_with(".count");
    if (limit.above_low) {
      EXPECT_NE(try_value(limit.engine.low), "") << limit.name;
      EXPECT_EQ(try_value(limit.engine.low + 0.5), "") << limit.name;
    } else {
      EXPECT_EQ(try_value(limit.engine.low), "") << limit.name;
      if (!counts_only) {
        EXPECT_NE(try_value(limit.engine.low - step), "") << limit.name;
      }
    }
    if (limit.engine.high < 1e6) {
      EXPECT_EQ(try_value(limit.engine.high), "") << limit.name;
      EXPECT_NE(try_value(limit.engine.high + step), "") << limit.name;
    }
    if (!limit.integer) {
      EXPECT_NE(try_value(std::nan("")), "") << limit.name;
      EXPECT_NE(try_value(INFINITY), "") << limit.name;
    }
    for (const Range& range : {limit.openai, limit.sglang}) {
      EXPECT_GE(range.low, limit.engine.low) << limit.name;
      EXPECT_LE(range.high, limit.engine.high) << limit.name;
    }
  }
  EXPECT_NE(refusal(fine(), 0), "");
  EXPECT_NE(refusal(fine(), 16385), "");
  EXPECT_EQ(refusal(fine(), 16384), "");
}

TEST(SamplingLimits, SaysWhatIsWrong) {
  const auto with = [](const std::function<void(SamplingParams&)>& change) {
    SamplingParams params = fine();
    change(params);
    return refusal(params);
  };
  EXPECT_EQ(with([](auto& p) { p.temperature = -1; }),
            "[rollout] temperature: wanted a finite number >= 0 (below 1e-5: greedy), got -1");
  EXPECT_EQ(with([](auto& p) { p.top_p = 0; }),
            "[rollout] top_p: wanted a number in (0, 1] (1: off), got 0");
  EXPECT_EQ(with([](auto& p) { p.top_k = -2; }),
            "[rollout] top_k: wanted an integer >= -1 (-1 or 0: off), got -2");
  EXPECT_EQ(with([](auto& p) { p.presence_penalty = 3; }),
            "[rollout] presence_penalty: wanted a number in [-2, 2] (0: off), got 3");
  EXPECT_EQ(with([](auto& p) { p.stop.assign(65, "x"); }),
            "[rollout] stop: wanted a number of entries in [0, 64], got 65");
  EXPECT_EQ(with([](auto& p) { p.stop = {""}; }),
            "[rollout] stop: wanted a length in [1, 4096] (bytes of each string), got 0");
  EXPECT_EQ(with([](auto& p) { p.max_tokens = 0; }),
            "[rollout] max_tokens: wanted >= 1 new token (0 only scores a prompt, with "
            "prompt_logprobs), got 0");
  EXPECT_EQ(with([](auto& p) { p.min_tokens = 11; }),
            "[rollout] min_tokens: wanted <= max_tokens = 10, got 11");
  EXPECT_EQ(with([](auto& p) { p.logit_bias = {{100, 1.0f}}; }),
            "[rollout] logit_bias: wanted token ids in [0, 100), got 100");
  EXPECT_EQ(with([](auto& p) { p.logit_bias = {{3, std::nanf("")}}; }),
            "[rollout] logit_bias: wanted finite numbers (clamped to +-100), got nan for token 3");
  EXPECT_EQ(with([](auto& p) { p.logit_bias = {{3, 1e9f}}; }), "");
  EXPECT_EQ(with([](auto& p) { p.bad_words = {{}}; }),
            "[rollout] bad_words: wanted at least one token for each word, got none");
  EXPECT_NE(with([](auto& p) { p.bad_words = {{1, 100}}; }), "");
  EXPECT_NE(with([](auto& p) { p.allowed_token_ids = {-1}; }), "");
  EXPECT_NE(with([](auto& p) { p.logprob_token_ids = {100}; }), "");
  EXPECT_NE(with([](auto& p) { p.eos_ids = {100}; }), "");
  EXPECT_EQ(with([](auto& p) { p.top_logprobs = kAllTokens; }), "");
  EXPECT_EQ(with([](auto& p) { p.repetition_detection = {.max_pattern = 2, .min_pattern = 3}; }),
            "[rollout] repetition_detection: wanted min_pattern <= max_pattern = 2, got 3");
  EXPECT_EQ(
      with([](auto& p) {
        p.grammar = std::make_shared<const TokenTable>(std::vector<int64_t>{0, 1},
                                                       std::vector<int32_t>{100},
                                                       std::vector<int32_t>{0},
                                                       std::vector<uint8_t>{1});
      }),
      "[rollout] grammar: wanted a token table made for a vocabulary of 100 ids, got token 100");
  SamplingParams stops = fine();
  stops.stop = {"x"};
  EXPECT_EQ(refusal(stops, 1, /*num_known=*/0),
            "[rollout] stop: wanted an engine that knows the bytes of its tokens, got one without "
            "a tokenizer");
}

// The model has rows beyond what the tokenizer knows: such an id would never be drawn as text.
TEST(Regression, added_stop_token_known) {
  SamplingParams params = fine();
  params.stop_token_ids = {95};
  EXPECT_EQ(refusal(params), "[rollout] stop_token_ids: wanted token ids in [0, 90), got 95");
  EXPECT_EQ(refusal(params, 1, /*num_known=*/96), "");
  EXPECT_EQ(refusal(params, 1, /*num_known=*/0), "");
}

TEST(TokenTable, WalksAndRefuses) {
  const TokenTable table({0, 2, 3, 3}, {4, 9, 4}, {1, 2, 2}, {0, 0, 1});
  EXPECT_EQ(table.num_states(), 3);
  EXPECT_EQ(table.next(0, 4), 1);
  EXPECT_EQ(table.next(0, 9), 2);
  EXPECT_EQ(table.next(0, 5), -1);
  EXPECT_EQ(table.next(2, 4), -1);
  EXPECT_FALSE(table.is_final(1));
  EXPECT_TRUE(table.is_final(2));
  EXPECT_EQ(table.max_token(), 9);
  const auto refused = [](std::vector<int64_t> offsets,
                          std::vector<int32_t> tokens,
                          std::vector<int32_t> targets,
                          std::vector<uint8_t> is_final) {
    try {
      TokenTable(std::move(offsets), std::move(tokens), std::move(targets), std::move(is_final));
    } catch (const std::invalid_argument& error) {
      return std::string(error.what()).rfind("[token_table]", 0) == 0;
    }
    return false;
  };
  EXPECT_TRUE(refused({0}, {}, {}, {}));                    // no state
  EXPECT_TRUE(refused({0, 1}, {}, {}, {1}));                // offsets past the tokens
  EXPECT_TRUE(refused({0, 2, 1}, {1, 2}, {0, 0}, {1, 1}));  // descending
  EXPECT_TRUE(refused({0, 2}, {1, 2}, {0}, {1}));           // a target is missing
  EXPECT_TRUE(refused({0, 2}, {2, 1}, {0, 0}, {1}));        // tokens descend
  EXPECT_TRUE(refused({0, 2}, {1, 1}, {0, 0}, {1}));        // a token twice
  EXPECT_TRUE(refused({0, 1}, {-1}, {0}, {1}));
  EXPECT_TRUE(refused({0, 1}, {1}, {1}, {1}));        // no such state
  EXPECT_TRUE(refused({0, 1, 1}, {1}, {1}, {0, 0}));  // a dead end
  EXPECT_FALSE(refused({0, 1, 1}, {1}, {1}, {0, 1}));
}

// The index of outlines_core 0.2.14 for (ab|b1)a* over {a: 0, b: 1, ab: 2 and 300, 1: 70000},
// end 9.
TEST(TokenTable, ReadsWhatOutlinesWrites) {
  const std::vector<int> numbers = {40,  2,  24, 48, 5,  24, 2, 0,  24, 9, 24,  40,  4,  0, 56,
                                    251, 44, 1,  48, 1,  64, 2, 48, 64, 1, 252, 112, 17, 1, 0,
                                    48,  56, 1,  1,  48, 48, 2, 0,  24, 9, 48,  9,   6};
  std::string bytes;
  for (const int number : numbers) bytes += static_cast<char>(number);
  const TokenTable table = read_outlines_index(bytes, /*end_token=*/9, /*max_bytes=*/1 << 20);
  EXPECT_EQ(table.num_states(), 5);
  EXPECT_EQ(table.max_token(), 70000);
  const auto accepts = [&](const std::vector<int32_t>& tokens) {
    int32_t state = table.start();
    for (const int32_t token : tokens) {
      state = state < 0 ? -1 : table.next(state, token);
    }
    return state >= 0 && table.is_final(state);
  };
  EXPECT_TRUE(accepts({0, 1}));
  EXPECT_TRUE(accepts({300, 0, 0}));
  EXPECT_TRUE(accepts({1, 70000}));
  EXPECT_FALSE(accepts({0}));
  EXPECT_FALSE(accepts({2, 2}));
  EXPECT_FALSE(accepts({2, 9}));  // the end is no token
  EXPECT_THROW(read_outlines_index(bytes, 9, /*max_bytes=*/64), std::invalid_argument);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(read_outlines_index(bytes.substr(0, size), 9, 1 << 20), std::invalid_argument);
  }
  EXPECT_THROW(read_outlines_index(bytes + "x", 9, 1 << 20), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::rollout
