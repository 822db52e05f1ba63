// For the tests of this folder: random logits, one draw from a row, and the law of the rollout
// specification 3.2 restated in double precision by sorting the whole vocabulary.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "banyan/rollout/sampling/row_sampler.h"

namespace banyan::rollout {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline std::vector<float> random_logits(int32_t vocab, float spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> z(vocab);
  for (float& value : z) value = normal(random);
  return z;
}

// Parameters that stop nothing.
inline SamplingParams free_params() {
  SamplingParams params;
  params.max_tokens = 1 << 20;
  return params;
}

inline SamplingParams with(const std::function<void(SamplingParams&)>& change) {
  SamplingParams params = free_params();
  change(params);
  return params;
}

// softmax = {0.1, 0.4, 0.2, 0.3}
inline const std::vector<float> kFour = {
    std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};

inline const std::vector<std::string>& no_bytes() {
  static const std::vector<std::string> none;
  return none;
}

// A plan and a response that holds `tokens`.
struct Response {
  Response(const SamplingParams& params,
           const std::vector<int32_t>& prompt,
           const std::vector<int32_t>& tokens,
           const std::vector<std::string>& bytes = no_bytes())
      : plan(params, prompt, /*original_prompt=*/0, bytes), state(plan) {
    for (const int32_t token : tokens) state.append(token);
  }
  SamplingPlan plan;
  ResponseState state;
};

inline Drawn draw_one(std::vector<float> z, const ResponseState& state, float u) {
  const std::vector<float> before = z;
  RowSampler sampler(static_cast<int32_t>(z.size()));
  sampler.load(z.data());
  Drawn drawn;
  sampler.draw(state, u, /*with_raw=*/true, drawn);
  EXPECT_EQ(z, before) << "the row was not put back";
  return drawn;
}

inline Drawn draw_one(const std::vector<float>& z, const SamplingParams& params, float u) {
  const Response response(params, {0}, {});
  return draw_one(z, response.state, u);
}

struct ExactLaw {
  std::vector<double> z;       // after step 2
  std::vector<double> p;       // what is drawn from
  double kept = 1.0;           // share of softmax(z' / T)
  std::vector<int32_t> order;  // of z'
};

// Steps 2 and 3 without grammar and bad words.
inline ExactLaw exact_law(const std::vector<float>& logits,
                          const SamplingParams& params,
                          const std::vector<int32_t>& prompt,
                          const std::vector<int32_t>& response) {
  ExactLaw law;
  law.z.assign(logits.begin(), logits.end());
  const auto size = static_cast<int32_t>(logits.size());
  const auto count = [](const std::vector<int32_t>& ids, int32_t id) {
    return static_cast<double>(std::count(ids.begin(), ids.end(), id));
  };
  const bool early = static_cast<int32_t>(response.size()) < params.min_tokens;
  for (int32_t id = 0; id < size; ++id) {
    double& z = law.z[id];
    if (!params.allowed_token_ids.empty() && count(params.allowed_token_ids, id) == 0) z = -kInf;
    if (early && (count(params.eos_ids, id) > 0 || count(params.stop_token_ids, id) > 0)) z = -kInf;
    for (const auto& [biased, bias] : params.logit_bias) z += biased == id ? bias : 0.0;
    const double said = count(response, id);
    if (said > 0 || count(prompt, id) > 0) {
      z = z > 0 ? z / params.repetition_penalty : z * params.repetition_penalty;
    }
    z -= params.frequency_penalty * said;
    if (said > 0) z -= params.presence_penalty;
  }
  law.order.resize(size);
  std::iota(law.order.begin(), law.order.end(), 0);
  std::stable_sort(law.order.begin(), law.order.end(), [&](int32_t a, int32_t b) {
    return law.z[a] > law.z[b];
  });
  const double t = params.temperature < kGreedyTemperature ? 1.0 : params.temperature;
  std::vector<double> mass;
  for (const int32_t id : law.order)
    mass.push_back(std::exp((law.z[id] - law.z[law.order[0]]) / t));
  const double all = std::accumulate(mass.begin(), mass.end(), 0.0);
  size_t end = mass.size();
  while (mass[end - 1] < params.min_p) --end;
  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < end) {
    const double kth = law.z[law.order[params.top_k - 1]];
    size_t k = params.top_k;
    while (params.top_k_ties && k < end && law.z[law.order[k]] == kth) ++k;
    end = k;
  }
  const double left = std::accumulate(mass.begin(), mass.begin() + end, 0.0);
  double kept = 0.0;
  size_t keep = 0;
  while (keep < end && (keep == 0 || params.top_p >= 1.0 || kept < params.top_p * left)) {
    kept += mass[keep++];
  }
  law.p.assign(size, 0.0);
  for (size_t i = 0; i < keep; ++i) law.p[law.order[i]] = mass[i] / kept;
  law.kept = kept / all;
  return law;
}

}  // namespace banyan::rollout
