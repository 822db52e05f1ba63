// A mini-batch of five groups of unequal work for tests over several ranks, and how far two results
// are apart.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "banyan/testing/tiny_run.h"
#include "banyan/train/batch.h"

namespace banyan::testing {

// Five groups of unequal work: nested responses, equal ones, prompts that share a trunk.
inline train::Batch batch_of_five() {
  train::Batch batch;
  for (int64_t row = 0; row < 5; ++row) {
    for (int32_t index = 0; index < 3; ++index) {
      Trajectory t;
      t.row = row;
      t.index = index;
      t.prompt = {1, 2, 3, 4, static_cast<int32_t>(10 + row / 2)};
      const int64_t length = 2 + (row * 5 + index * 3) % 9;
      for (int64_t k = 0; k < length; ++k) {
        const bool shared = k < 2;
        t.response.push_back(static_cast<int32_t>(20 + (shared ? k : k * 7 + index * 3) % 60));
      }
      t.response_mask.assign(length, 1);
      t.rollout_log_probs.assign(length, -2.0F);
      Score score;
      score.row = row;
      score.index = index;
      batch.trajectories.push_back(t);
      batch.scores.push_back(score);
      batch.advantage.push_back(
          at::full({length}, 0.3 * static_cast<double>(index) - 0.2 * static_cast<double>(row)));
      batch.advantage.back() = batch.advantage.back().to(at::kDouble);
    }
  }
  return batch;
}

inline train::MiniBatch all_of(const train::Batch& batch) {
  train::MiniBatch all{{}, 1, 0};
  for (int64_t i = 0; i < batch.size(); ++i) all.samples.push_back(i);
  return all;
}

inline double relative(const at::Tensor& a, const at::Tensor& b) {
  const double norm = b.to(at::kDouble).norm().item<double>();
  const double gap = a.to(at::kDouble).sub(b.to(at::kDouble)).norm().item<double>();
  return norm > 0.0 ? gap / norm : gap;
}

inline void expect_near(const std::vector<at::Tensor>& a,
                        const std::vector<at::Tensor>& b,
                        double bound,
                        const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_LE(relative(a[i], b[i]), bound) << what << " " << i;
}

inline Config small_blocks() {
  Config config = tiny_config("", "");
  config.actor.ppo_max_token_len_per_gpu = 24;  // trunks are cut across blocks
  config.rollout.train.n = 3;
  return config;
}

}  // namespace banyan::testing
