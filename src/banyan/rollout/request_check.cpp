#include "banyan/rollout/request_check.h"

#include <cmath>

#include "banyan/core/error.h"
#include "banyan/rollout/sampling/limits.h"

namespace banyan::rollout {
namespace {

constexpr int32_t kMaxResponses = 16384;

}  // namespace

void check_options(const EngineOptions& options) {
  BANYAN_CHECK(
      options.max_num_seqs >= 1, "[rollout] max_num_seqs: wanted >= 1, got ", options.max_num_seqs);
  BANYAN_CHECK(options.max_num_batched_tokens >= 1,
               "[rollout] max_num_batched_tokens: wanted >= 1, got ",
               options.max_num_batched_tokens);
  BANYAN_CHECK(options.kv_bytes >= 0,
               "[rollout] kv_bytes: wanted >= 0 (0: a share of the free memory), got ",
               options.kv_bytes);
  BANYAN_CHECK(options.memory_share > 0.0 && options.memory_share <= 1.0,
               "[rollout] gpu_memory_utilization: wanted a share in (0, 1], got ",
               options.memory_share);
  BANYAN_CHECK(options.max_model_len >= 0,
               "[rollout] max_model_len: wanted >= 0 (0: the model's), got ",
               options.max_model_len);
}

void check_params(const SamplingParams& params, int64_t vocab) {
  check_sampling(params, /*n=*/1, vocab, /*num_known=*/0);
}

void check_prompts(const std::vector<Prompt>& prompts,
                   const EngineOptions& options,
                   int64_t vocab,
                   int64_t max_len) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Prompt& prompt = prompts[i];
    const int64_t length = static_cast<int64_t>(prompt.tokens.size());
    const auto where = [&] {
      return detail::concat("[rollout] prompt ", i, " (row ", prompt.row, ")");
    };
    BANYAN_CHECK(length >= 1, where(), ": wanted at least one token, got none");
    BANYAN_CHECK(prompt.n >= 1 && prompt.n <= kMaxResponses,
                 where(),
                 ": wanted n in [1, ",
                 kMaxResponses,
                 "] responses, got ",
                 prompt.n);
    BANYAN_CHECK(length < max_len,
                 where(),
                 ": wanted fewer than max_model_len = ",
                 max_len,
                 " tokens, so that a response has room, got ",
                 length);
    BANYAN_CHECK(options.enable_chunked_prefill || length <= options.max_num_batched_tokens,
                 where(),
                 ": wanted at most max_num_batched_tokens = ",
                 options.max_num_batched_tokens,
                 " tokens without chunked prefill, got ",
                 length,
                 "; raise it or set enable_chunked_prefill");
    for (size_t t = 0; t < prompt.tokens.size(); ++t) {
      BANYAN_CHECK(prompt.tokens[t] >= 0 && prompt.tokens[t] < vocab,
                   where(),
                   ": wanted token ids in [0, ",
                   vocab,
                   "), got ",
                   prompt.tokens[t],
                   " at position ",
                   t);
    }
  }
}

}  // namespace banyan::rollout
