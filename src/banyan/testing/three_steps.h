// Three updates of a model over some layout of ranks, and how they compare with one process.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "banyan/parallel/weight_view.h"
#include "banyan/testing/five_groups.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/update.h"

namespace banyan::testing {

using Named = std::map<std::string, at::Tensor>;

struct Trained {
  train::UpdateResult first;  // of the first update
  Named gradients;            // whole
  Named changes;              // of the weights over three steps
};

// Five groups, with what a critic wants.
inline train::Batch batch_with_values() {
  train::Batch batch = batch_of_five();
  for (const at::Tensor& advantage : batch.advantage) {
    batch.value.push_back(at::full_like(advantage, 0.1));
    batch.returns.push_back(advantage);
  }
  return batch;
}

inline Named whole_gradients(models::CausalLM& model, const parallel::WeightView& view) {
  std::vector<at::Tensor> own;
  for (const Param& param : model.params().params()) own.push_back(param.grad);
  Named out;
  view.each_of(own, [&](const auto& name, const at::Tensor& whole) { out[name] = whole.clone(); });
  return out;
}

// `shard`: moments are shared out over the data-parallel ranks.
inline Trained three_steps(const Config& config,
                           models::CausalLM& model,
                           const train::Layout& layout,
                           bool shard,
                           parallel::Groups& groups) {
  optim::AdamW optimizer(model.params(),
                         train::adamw_options(config.actor.optim),
                         shard ? &groups.data : nullptr,
                         &groups.model);
  const train::Batch batch = batch_with_values();
  const parallel::WeightView view(model.params(), groups);
  Trained out;
  Named before;
  view.each([&](const auto& name, const at::Tensor& whole) { before[name] = whole.clone(); });
  for (int step = 0; step < 3; ++step) {
    train::UpdateResult result = train::update(
        config, batch, all_of(batch), layout, /*verify=*/false, 1e-3, model, optimizer);
    if (step > 0) continue;
    out.first = std::move(result);
    out.gradients = whole_gradients(model, view);
  }
  view.each([&](const auto& name, const at::Tensor& whole) {
    out.changes[name] = whole.sub(before.at(name));
  });
  return out;
}

inline void expect_near(const Named& a, const Named& b, double bound, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : b) {
    EXPECT_LE(relative(a.at(name), tensor), bound) << what << " " << name;
  }
}

// Gradients are compared where they have been added on every rank, not only in its share.
inline void expect_same_training(const Trained& mine,
                                 const Trained& one,
                                 at::ScalarType dtype,
                                 bool shard,
                                 const std::string& what) {
  const bool wide = dtype == at::kDouble;
  const double bound = wide ? 1e-10 : 1e-5;
  EXPECT_LE(std::abs(mine.first.loss.loss - one.first.loss.loss), bound) << what;
  EXPECT_LE(std::abs(mine.first.grad_norm / one.first.grad_norm - 1.0), bound) << what;
  EXPECT_EQ(mine.first.logical_tokens, one.first.logical_tokens) << what;
  if (one.first.routers) {
    EXPECT_NEAR(mine.first.routers->loss, one.first.routers->loss, bound) << what;
    EXPECT_NEAR(mine.first.routers->max_load, one.first.routers->max_load, bound) << what;
  }
  if (!shard) expect_near(mine.gradients, one.gradients, bound, what + " gradient");
  expect_near(mine.changes, one.changes, wide ? 1e-8 : 1e-3, what + " change");
  for (size_t k = 0; k < one.first.log_prob.size(); ++k) {
    EXPECT_LE(relative(mine.first.log_prob[k], one.first.log_prob[k]), bound) << what;
  }
}

}  // namespace banyan::testing
