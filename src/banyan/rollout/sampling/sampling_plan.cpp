#include "banyan/rollout/sampling/sampling_plan.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/rollout/sampling/token_table.h"

namespace banyan::rollout {
namespace {

std::vector<int32_t> distinct(std::vector<int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

// link[i]: length of the longest proper prefix of text[0 .. i] that also ends it (Knuth, Morris,
// Pratt, "Fast pattern matching in strings", 1977).
void append_links(const std::string& text, std::vector<int32_t>& links) {
  const size_t first = links.size();
  links.resize(first + text.size(), 0);
  int32_t* const link = links.data() + first;
  int32_t length = 0;
  for (size_t i = 1; i < text.size(); ++i) {
    while (length > 0 && text[length] != text[i]) length = link[length - 1];
    if (text[length] == text[i]) ++length;
    link[i] = length;
  }
}

int32_t grammar_after(const SamplingParams& params, const std::vector<int32_t>& past) {
  if (!params.grammar) return 0;
  int32_t state = params.grammar->start();
  for (size_t i = 0; i < past.size(); ++i) {
    state = params.grammar->next(state, past[i]);
    if (state < 0) {
      throw RequestError(400,
                         "prompt",
                         detail::concat("[rollout] prompt: wanted a continuation that the "
                                        "structured output allows, got token ",
                                        past[i],
                                        " at position ",
                                        i,
                                        " of the response so far"));
    }
  }
  return state;
}

}  // namespace

SamplingPlan::SamplingPlan(const SamplingParams& params_in,
                           const std::vector<int32_t>& prompt,
                           int32_t original_prompt,
                           const std::vector<std::string>& bytes)
    : params(params_in),
      token_bytes(&bytes),
      greedy(params.temperature < kGreedyTemperature),
      inverse_temperature(greedy ? 1.0f : static_cast<float>(1.0 / params.temperature)),
      truncates(!greedy && (params.top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0)),
      penalises(params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 ||
                params.presence_penalty != 0.0),
      masks(params.grammar != nullptr || !params.allowed_token_ids.empty()),
      edits(penalises || masks || !params.bad_words.empty() || !params.logit_bias.empty()),
      collects(params.top_logprobs >= 0 || !params.logprob_token_ids.empty() ||
               params.return_sampling_mask),
      allowed(distinct(params.allowed_token_ids)) {
  if (original_prompt > 0) past.assign(prompt.begin() + original_prompt, prompt.end());
  if (params.repetition_penalty != 1.0) {
    prompt_tokens = distinct({prompt.begin(), prompt.end() - static_cast<int64_t>(past.size())});
  }
  end_ids = params.stop_token_ids;
  if (!params.ignore_eos) {
    end_ids.insert(end_ids.end(), params.eos_ids.begin(), params.eos_ids.end());
  }
  end_ids = distinct(std::move(end_ids));
  grammar_start = grammar_after(params, past);
  for (const std::string& stop : params.stop) {
    stop_offsets.push_back(static_cast<int32_t>(stop_links.size()));
    append_links(stop, stop_links);
  }
}

}  // namespace banyan::rollout
