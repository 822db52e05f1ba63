// Why responses end: the stop order, stop strings across token borders, repetition, grammars; and
// that what is kept equals a recount of the tokens.
#include "banyan/rollout/sampling/response_state.h"

#include <map>
#include <memory>

#include "banyan/rollout/sampling/test_support.h"
#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {
namespace {

using Kind = Ending::Kind;

// One token per byte, then some longer ones.
std::vector<std::string> make_bytes() {
  std::vector<std::string> bytes;
  for (int b = 0; b < 256; ++b) bytes.emplace_back(1, static_cast<char>(b));
  for (const char* text : {"END", "xEN", "Dy", "aab", "", "\n\n", "ab\nab\n"}) {
    bytes.emplace_back(text);
  }
  return bytes;
}
const std::vector<std::string> kBytes = make_bytes();
enum : int32_t { kEnd = 256, kXEn, kDy, kAab, kNothing, kTwoLines, kAbLines };

// The ending of `tokens`, which must come with the last of them.
Ending ending_of(const SamplingParams& params, const std::vector<int32_t>& tokens) {
  const SamplingPlan plan(params, {0}, 0, kBytes);
  ResponseState state(plan);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Ending ending = state.append(tokens[i]);
    if (i + 1 == tokens.size()) return ending;
    EXPECT_FALSE(ending) << "ended at token " << i;
  }
  return {};
}

TEST(ResponseState, TheStopOrder) {
  SamplingParams params = free_params();
  params.eos_ids = {7};
  params.stop_token_ids = {7, 8};
  params.stop = {"a"};
  params.repetition_detection = {.max_pattern = 1, .min_pattern = 1, .min_count = 2};
  params.max_tokens = 3;
  EXPECT_EQ(ending_of(params, {7}).kind, Kind::kEos);  // before the stop id
  EXPECT_EQ(ending_of(params, {7}).stop_token, -1);
  EXPECT_EQ(ending_of(params, {8}).kind, Kind::kStopToken);
  EXPECT_EQ(ending_of(params, {8}).stop_token, 8);
  EXPECT_EQ(ending_of(params, {1, 2, 8}).kind, Kind::kStopToken);  // before the length
  EXPECT_EQ(ending_of(params, {1, 2, 'a'}).kind, Kind::kLength);   // before the stop string
  EXPECT_EQ(ending_of(params, {1, 2, 2}).kind, Kind::kLength);     // before repetition
  EXPECT_EQ(ending_of(params, {1, 1}).kind, Kind::kRepetition);
  EXPECT_EQ(ending_of(params, {'a'}).kind, Kind::kStopString);
  params.ignore_eos = true;
  EXPECT_EQ(ending_of(params, {7}).kind, Kind::kStopToken);
  params.stop_token_ids = {};
  EXPECT_EQ(ending_of(params, {7}).kind, Kind::kNone);
  params.min_tokens = 2;
  EXPECT_EQ(ending_of(params, {'a', 'b'}).kind, Kind::kNone);
  EXPECT_EQ(ending_of(params, {'b', 'a'}).kind, Kind::kStopString);
  EXPECT_EQ(ending_of(params, {1, 1}).kind, Kind::kRepetition);
  params.stop = {"aa"};
  params.repetition_detection = {};
  params.max_tokens = 9;
  params.min_tokens = 3;
  EXPECT_EQ(ending_of(params, {'a', 'a', 'a'}).kind, Kind::kStopString);  // the match goes on
  EXPECT_EQ((Ending{.kind = Kind::kRepetition}.reason()), FinishReason::kRepetition);
  EXPECT_EQ((Ending{.kind = Kind::kLength}.reason()), FinishReason::kLength);
  EXPECT_EQ((Ending{.kind = Kind::kStopString}.reason()), FinishReason::kStop);
  EXPECT_EQ((Ending{.kind = Kind::kEos}.reason()), FinishReason::kStop);
}

// Wherever the tokens are split, the ids end at the token that completes the match.
TEST(Regression, stop_string_mid_token) {
  SamplingParams params = free_params();
  params.stop = {"zz", "END"};
  const auto expect_stop = [&](const std::vector<int32_t>& tokens) {
    const Ending ending = ending_of(params, tokens);
    EXPECT_EQ(ending.kind, Kind::kStopString);
    EXPECT_EQ(ending.stop_string, 1);
    EXPECT_FALSE(ending_of(params, {tokens.begin(), tokens.end() - 1}));
  };
  expect_stop({'a', kEnd});
  expect_stop({'a', kXEn, kDy});        // begins and ends inside tokens
  expect_stop({kXEn, kNothing, 'D'});   // a token without bytes between
  expect_stop({'E', 'E', 'N', 'D'});    // a restart inside a match
  expect_stop({'E', 'N', kXEn, kEnd});  // "ENxENEND"
  EXPECT_FALSE(ending_of(params, {'E', 'N', 'E', 'D'}));
  params.stop = {"\n\nx", "b\nab", "\n"};
  const Ending first = ending_of(params, {kAbLines});
  EXPECT_EQ(first.stop_string, 2);  // "\n" ends before "b\nab" does
  params.stop = {"ab", "aab"};
  EXPECT_EQ(ending_of(params, {kAab}).stop_string, 0);  // both end there: the first in the list
  params.stop = {"\xe2\x82\xac"};                       // one character in three tokens
  EXPECT_EQ(ending_of(params, {'5', 0xe2, 0x82, 0xac}).stop_string, 0);
  EXPECT_FALSE(ending_of(params, {'5', 0xe2, 0x82}));
}

TEST(ResponseState, StopStringsEqualASearchOfTheText) {
  std::mt19937 random(3);
  const auto text_of = [&](size_t size) {
    std::string text;
    for (size_t i = 0; i < size; ++i) text += static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int trial = 0; trial < 400; ++trial) {
    SamplingParams params = free_params();
    for (int i = 0; i < 3; ++i) params.stop.push_back(text_of(1 + random() % 7));
    std::vector<std::string> bytes;
    for (int i = 0; i < 12; ++i) bytes.push_back(text_of(random() % 5));
    const SamplingPlan plan(params, {0}, 0, bytes);
    ResponseState state(plan);
    std::string text;
    for (int i = 0; i < 200; ++i) {
      const auto token = static_cast<int32_t>(random() % bytes.size());
      const Ending ending = state.append(token);
      text += bytes[token];
      size_t end = std::string::npos;  // of the match that ends first
      size_t which = 0;
      for (size_t s = 0; s < params.stop.size(); ++s) {
        const size_t at = text.find(params.stop[s]);
        if (at != std::string::npos &&
            (end == std::string::npos || at + params.stop[s].size() < end)) {
          end = at + params.stop[s].size();
          which = s;
        }
      }
      ASSERT_EQ(static_cast<bool>(ending), end != std::string::npos);
      if (!ending) continue;
      EXPECT_EQ(ending.stop_string, static_cast<int32_t>(which));
      break;
    }
  }
}

TEST(ResponseState, MatchingIsLinear) {
  // a^4000 b never comes, and each byte restarts a naive search. Quadratic work would take minutes.
  SamplingParams params = free_params();
  params.stop = {std::string(4000, 'a') + "b"};
  const std::vector<std::string> bytes = {std::string(100, 'a')};
  const SamplingPlan plan(params, {0}, 0, bytes);
  ResponseState state(plan);
  for (int i = 0; i < 50000; ++i) ASSERT_FALSE(state.append(0));
}

TEST(ResponseState, FindsRepetition) {
  const auto repeats = [](RepetitionDetection detection, const std::vector<int32_t>& tokens) {
    SamplingParams params = free_params();
    params.repetition_detection = detection;
    const SamplingPlan plan(params, {0}, 0, kBytes);
    ResponseState state(plan);
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (state.append(tokens[i]).kind == Kind::kRepetition) return static_cast<int>(i) + 1;
    }
    return 0;
  };
  EXPECT_EQ(repeats({.max_pattern = 3, .min_pattern = 1, .min_count = 3}, {5, 5, 5}), 3);
  EXPECT_EQ(repeats({.max_pattern = 3, .min_pattern = 2, .min_count = 3}, {5, 5, 5, 5, 5, 5}), 6);
  EXPECT_EQ(repeats({.max_pattern = 3, .min_pattern = 1, .min_count = 2}, {1, 2, 3, 1, 2, 3}), 6);
  EXPECT_EQ(repeats({.max_pattern = 2, .min_pattern = 1, .min_count = 2}, {1, 2, 3, 1, 2, 3}), 0);
  EXPECT_EQ(repeats({}, {1, 1, 1, 1, 1, 1}), 0);
  std::mt19937 random(4);
  for (int trial = 0; trial < 300; ++trial) {
    const RepetitionDetection detection{.max_pattern = 1 + static_cast<int32_t>(random() % 5),
                                        .min_pattern = 1,
                                        .min_count = 2 + static_cast<int32_t>(random() % 3)};
    std::vector<int32_t> tokens;
    int wanted = 0;
    for (int i = 0; i < 60; ++i) {
      tokens.push_back(static_cast<int32_t>(random() % 2));
      for (int32_t p = 1; p <= detection.max_pattern && wanted == 0; ++p) {
        const int32_t length = p * detection.min_count;
        if (length > static_cast<int32_t>(tokens.size())) continue;
        const auto begin = tokens.end() - length;
        if (std::equal(begin + p, tokens.end(), begin)) wanted = i + 1;
      }
    }
    EXPECT_EQ(repeats(detection, tokens), wanted);
  }
}

TEST(ResponseState, CountsEqualARecount) {
  SamplingParams params = free_params();
  params.repetition_penalty = 1.1;
  const std::vector<int32_t> prompt = {5, 900, 5, 2};
  const SamplingPlan plan(params, prompt, 0, kBytes);
  EXPECT_EQ(plan.prompt_tokens, (std::vector<int32_t>{2, 5, 900}));
  ResponseState state(plan);
  std::mt19937 random(6);
  std::map<int32_t, int32_t> wanted;
  for (int i = 0; i < 3000; ++i) {
    const auto token = static_cast<int32_t>(random() % 1000);
    ++wanted[token];
    EXPECT_FALSE(state.append(token));
  }
  ASSERT_EQ(state.counts().size(), wanted.size());
  for (const ResponseState::TokenCount& entry : state.counts()) {
    EXPECT_EQ(entry.count, wanted[entry.token]);
    EXPECT_EQ(entry.in_prompt, entry.token == 2 || entry.token == 5 || entry.token == 900);
  }
}

TEST(ResponseState, AContinuationGoesOnWhereTheResponseWas) {
  SamplingParams params = free_params();
  params.repetition_penalty = 1.5;
  params.bad_words = {{1, 2}};
  params.stop = {"END"};
  params.repetition_detection = {.max_pattern = 2, .min_pattern = 2, .min_count = 2};
  const SamplingPlan plan(params, {9, 9, 'E', 1}, 2, kBytes);
  EXPECT_EQ(plan.prompt_tokens, (std::vector<int32_t>{9}));
  EXPECT_EQ(plan.past, (std::vector<int32_t>{'E', 1}));
  ResponseState state(plan);
  EXPECT_EQ(state.num_tokens(), 0);
  EXPECT_EQ(state.counts().size(), 2u);
  EXPECT_EQ(state.history(), (std::vector<int32_t>{'E', 1}));
  EXPECT_FALSE(state.append('E'));
  EXPECT_EQ(state.append(1).kind, Kind::kRepetition);

  const SamplingPlan text(params, {9, 9, 'a', 'E'}, 2, kBytes);
  ResponseState cut(text);
  EXPECT_FALSE(cut.append('N'));
  const Ending ending = cut.append('D');
  EXPECT_EQ(ending.kind, Kind::kStopString);
}

TEST(ResponseState, AGrammarEndsWithEosOrByItself) {
  SamplingParams params = free_params();
  params.grammar = std::make_shared<const TokenTable>(std::vector<int64_t>{0, 1, 2, 2},
                                                      std::vector<int32_t>{1, 2},
                                                      std::vector<int32_t>{1, 2},
                                                      std::vector<uint8_t>{0, 1, 1});
  params.eos_ids = {3};
  params.ignore_eos = true;
  EXPECT_EQ(ending_of(params, {1, 3}).kind, Kind::kEos);
  EXPECT_EQ(ending_of(params, {1, 2, 3}).kind, Kind::kEos);
  EXPECT_EQ(ending_of(params, {1, 2}).kind, Kind::kNone);
  params.eos_ids = {};
  EXPECT_EQ(ending_of(params, {1, 2}).kind, Kind::kEos);  // nothing could say so
  EXPECT_NO_THROW(SamplingPlan(params, {0, 1}, 1, kBytes));
  try {
    const SamplingPlan plan(params, {0, 1, 1}, 1, kBytes);
    ADD_FAILURE() << "no error";
  } catch (const RequestError& error) {
    EXPECT_EQ(error.code, 400);
    EXPECT_EQ(error.param, "prompt");
    EXPECT_NE(std::string(error.what()).find("got token 1 at position 1 of the response so far"),
              std::string::npos);
  }
}

TEST(ResponseState, MinTokensAloneMakesARowSpecialAtFirst) {
  SamplingParams params = free_params();
  params.eos_ids = {3};
  params.min_tokens = 2;
  const SamplingPlan plan(params, {0}, 0, kBytes);
  ResponseState state(plan);
  EXPECT_FALSE(state.plain());
  state.append(1);
  EXPECT_FALSE(state.plain());
  state.append(1);
  EXPECT_TRUE(state.plain());
}

}  // namespace
}  // namespace banyan::rollout
