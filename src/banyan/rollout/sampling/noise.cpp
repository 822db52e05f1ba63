#include "banyan/rollout/sampling/noise.h"

#include <algorithm>

namespace banyan::rollout {
namespace {

// The finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t prompt_digest(const std::vector<int32_t>& tokens, int64_t count) {
  const int64_t size = std::min<int64_t>(count, static_cast<int64_t>(tokens.size()));
  uint64_t digest = mix(static_cast<uint64_t>(size) + 0x9e3779b97f4a7c15ULL);
  for (int64_t i = 0; i < size; ++i) {
    digest = mix(digest + 0x9e3779b97f4a7c15ULL + static_cast<uint32_t>(tokens[i]));
  }
  return digest;
}

NoiseKey noise_key(const Request& request, int32_t index) {
  const SamplingParams& params = request.params;
  if (request.row >= 0) {
    return {.seed = params.seed,
            .step = params.step,
            .row = static_cast<uint64_t>(request.row),
            .index = static_cast<uint64_t>(index)};
  }
  const int64_t size = static_cast<int64_t>(request.prompt.size());
  const int64_t count = request.original_prompt > 0 ? request.original_prompt : size;
  return {.seed = params.seed + static_cast<uint64_t>(index),
          .step = params.step,
          .row = prompt_digest(request.prompt, count),
          .index = 0};
}

}  // namespace banyan::rollout
