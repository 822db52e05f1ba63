// For the tests of this folder: a model that is a hash. The next token is a function of the tokens
// before it and of the sample, so responses are known without any schedule.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "banyan/core/rng.h"

namespace banyan::rollout {

inline constexpr int32_t kPaperVocab = 400;
inline constexpr int32_t kPaperStop = 3;

inline int32_t next_token(const std::vector<int32_t>& tokens, int64_t row, int32_t index) {
  uint64_t hash = 1;
  for (const int32_t token : tokens) hash = hash * 1000003 + static_cast<uint64_t>(token) + 1;
  const NoiseKey key{.seed = hash,
                     .step = 0,
                     .row = static_cast<uint64_t>(row),
                     .index = static_cast<uint64_t>(index)};
  return static_cast<int32_t>(uniform(key, tokens.size()) * kPaperVocab);
}

// The response without any schedule.
inline std::vector<int32_t> plain_response(
    std::vector<int32_t> tokens, int32_t max_new, bool ignore_eos, int64_t row, int32_t index) {
  std::vector<int32_t> response;
  while (static_cast<int32_t>(response.size()) < max_new) {
    response.push_back(next_token(tokens, row, index));
    tokens.push_back(response.back());
    if (response.back() == kPaperStop && !ignore_eos) break;
  }
  return response;
}

inline std::vector<int32_t> random_tokens(std::mt19937& random, int32_t count) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kPaperVocab);
  return tokens;
}

inline std::vector<int32_t> join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace banyan::rollout
