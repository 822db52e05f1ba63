#include "banyan/rollout/request_check.h"

#include <gtest/gtest.h>

#include <cmath>
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
               "wanted 49152 bytes, got a pool of 32768 bytes; raise gpu_memory_utilization");
}

}  // namespace
}  // namespace banyan::rollout
