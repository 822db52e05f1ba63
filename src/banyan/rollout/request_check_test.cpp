#include "banyan/rollout/request_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "banyan/rollout/test_support.h"

namespace banyan::rollout {
namespace {

void expect_error(const std::vector<Prompt>& prompts,
                  const SamplingParams& params,
                  const EngineOptions& options,
                  const std::string& text) {
  try {
    generate(shared_model(), prompts, params, options);
    ADD_FAILURE() << "no error; wanted: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
        << "wanted: " << text << "\ngot: " << error.what();
  }
}

TEST(RequestCheck, SaysWhatIsWrong) {
  const auto prompts = make_prompts(/*count=*/1, /*trunk=*/20, /*n=*/1);  // 25 tokens
  const auto with = [](auto change) {
    SamplingParams params = make_params(10);
    change(params);
    return params;
  };
  const auto prompt_with = [&](auto change) {
    std::vector<Prompt> changed = prompts;
    change(changed[0]);
    return changed;
  };
  const SamplingParams fine = make_params(10);
  const auto nan = std::nan("");
  expect_error(prompts,
               with([](auto& p) { p.temperature = -1; }),
               {},
               "[rollout] temperature: wanted a finite number >= 0 (below 1e-5: greedy), got -1");
  expect_error(prompts, with([&](auto& p) { p.temperature = nan; }), {}, "temperature: wanted");
  for (const double p : {0.0, 1.5, nan}) {
    expect_error(prompts,
                 with([&](auto& params) { params.top_p = p; }),
                 {},
                 "[rollout] top_p: wanted a number in (0, 1] (1: off), got ");
  }
  expect_error(prompts,
               with([](auto& p) { p.top_k = -2; }),
               {},
               "[rollout] top_k: wanted an integer >= -1 (-1 or 0: off), got -2");
  expect_error(prompts,
               with([](auto& p) { p.max_tokens = 0; }),
               {},
               "[rollout] max_tokens: wanted >= 1 new token (0 only scores");
  expect_error(prompts,
               with([](auto& p) { p.eos_ids = {2, 300}; }),
               {},
               "[rollout] eos_ids: wanted token ids in [0, 300), got 300");
  expect_error(prompt_with([](auto& p) { p.tokens.clear(); }),
               fine,
               {},
               "[rollout] prompt 0 (row 100): wanted at least one token, got none");
  expect_error(prompt_with([](auto& p) { p.tokens[3] = 300; }),
               fine,
               {},
               "[rollout] prompt 0 (row 100): wanted token ids in [0, 300), got 300 at position 3");
  expect_error(prompt_with([](auto& p) { p.n = 0; }),
               fine,
               {},
               "[rollout] prompt 0 (row 100): wanted n in [1, 16384] responses, got 0");
  expect_error(
      prompts,
      fine,
      {.max_model_len = 25},
      "[rollout] prompt 0 (row 100): wanted fewer than max_model_len = 25 tokens, so that a "
      "response has room, got 25");
  expect_error(prompts,
               fine,
               {.max_num_batched_tokens = 24, .enable_chunked_prefill = false},
               "wanted at most max_num_batched_tokens = 24 tokens without chunked prefill, got 25");
  expect_error(prompts, fine, {.max_num_seqs = 0}, "[rollout] max_num_seqs: wanted >= 1, got 0");
  expect_error(prompts,
               fine,
               {.max_num_batched_tokens = 0},
               "[rollout] max_num_batched_tokens: wanted >= 1, got 0");
  expect_error(prompts, fine, {.kv_bytes = -1}, "[rollout] kv_bytes: wanted >= 0");
  expect_error(prompts, fine, {.host_kv_bytes = -2}, "[rollout] host_kv_bytes: wanted >= 0, or -1");
  expect_error(prompts,
               fine,
               {.memory_share = 0.0},
               "[rollout] gpu_memory_utilization: wanted a share in (0, 1], got 0");
  expect_error(prompts, fine, {.max_model_len = -1}, "[rollout] max_model_len: wanted >= 0");
  // One page of 2 layers, 2 heads, 64 positions, 16 elements, keys and values, bf16: 16384 bytes.
  expect_error(prompts,
               make_params(100),
               {.kv_bytes = 40000},
               "[rollout] kv pool: a prompt of 25 tokens with 100 new ones can never fit: "
               "wanted 49152 bytes, got a pool of 32768 bytes; raise kv_cache_memory_bytes");
  expect_error(prompt_with([](auto& p) {
                 p.first_index = std::numeric_limits<int32_t>::max();
                 p.n = 2;
               }),
               fine,
               {},
               "[rollout] first_index: wanted first_index + n <= 2147483648, got 2147483647 and n");
}

TEST(RequestCheck, LabelsHaveNoControlCharacters) {
  const RequestLimits limits{.vocab = 300, .max_len = 100, .max_num_batched_tokens = 50};
  const auto param_of = [&](auto change) -> std::string {
    Request request;
    request.prompt = {1, 2};
    request.params.max_tokens = 4;
    change(request);
    try {
      check_request(request, limits, "");
    } catch (const RequestError& error) {
      EXPECT_EQ(error.code, 400);
      return error.param;
    }
    return "";
  };
  for (const char* bad : {"a\nb", "\r", "a\tb", "\x7f", "\x1b[0m", "a\xc2\x85"}) {
    EXPECT_EQ(param_of([&](auto& r) { r.id = bad; }), "request_id") << bad;
    EXPECT_EQ(param_of([&](auto& r) { r.group_id = bad; }), "group_id") << bad;
    EXPECT_EQ(param_of([&](auto& r) { r.source = bad; }), "source") << bad;
  }
  EXPECT_EQ(param_of([](auto& r) { r.id = std::string("a\0b", 3); }), "request_id");
  EXPECT_EQ(param_of([](auto& r) { r.group_id = std::string(600, 'x'); }), "group_id");
  for (const char* good : {"cmpl-12", "a b", "\xc3\xa9", "\xc2\xa0"}) {
    EXPECT_EQ(param_of([&](auto& r) { r.id = good; }), "") << good;
  }
}

TEST(RequestCheck, AFullQueueSaysWhenToComeBack) {
  const EngineOptions options{.max_num_queued_reqs = 3, .max_num_queued_tokens = 100};
  const auto refusal = [&](const QueueState& queue, int64_t tokens) {
    try {
      check_queue(options, queue, tokens);
    } catch (const RequestError& error) {
      EXPECT_EQ(error.code, 503);
      return std::make_pair(error.retry_after, std::string(error.what()));
    }
    return std::make_pair(0.0, std::string());
  };
  EXPECT_EQ(refusal({2, 50, 9.0}, 50).first, 0.0);
  EXPECT_EQ(refusal({0, 0, 9.0}, 1000).first, 0.0);  // longer than the limit: alone
  EXPECT_EQ(refusal({3, 0, 8.2}, 1),
            std::make_pair(9.0,
                           std::string("[rollout] queue: wanted fewer than max_num_queued_reqs = 3 "
                                       "waiting requests, got 3; try again")));
  EXPECT_EQ(refusal({2, 50, 0.0}, 51),
            std::make_pair(1.0,
                           std::string("[rollout] queue: wanted at most max_num_queued_tokens = "
                                       "100 waiting prompt tokens, got 101; try again")));
  EXPECT_EQ(refusal({3, 0, 1e9}, 1).first, 60.0);
}

}  // namespace
}  // namespace banyan::rollout
