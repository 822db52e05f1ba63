// Three updates of a model whose weights lie in parts on several ranks, and of whole weights.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "banyan/parallel/fsdp.h"
#include "banyan/testing/five_groups.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/train/apply_gradients.h"
#include "banyan/train/update.h"

namespace banyan::testing::sharded {

using namespace train;  // what these are steps of

inline constexpr int64_t kLayers = 2;  // of the tiny model

struct Setting {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  bool share = true;
  parallel::FsdpOptions options = {};
  nn::Recompute recompute = {};
  int64_t steps = 3;
  bool verify = false;
  bool experts = false;
};

struct Trained {
  UpdateResult first;
  std::vector<at::Tensor> gradients;  // of the first update
  std::vector<at::Tensor> changes;
  std::map<std::string, parallel::Traffic> shard, replica;
  int64_t num_gathers = 0;  // of the first update
};

inline std::unique_ptr<models::CausalLM> fresh(at::ScalarType dtype,
                                               const nn::Recompute& recompute,
                                               bool experts = false) {
  const std::string config =
      experts ? testing::tiny_moe_config_json() : testing::tiny_config_json();
  auto model = models::random_model(config, 3, {{.dtype = dtype}, true});
  model->set_recompute(recompute);
  return model;
}

// ZeRO-1 over `ranks`, or one process.
inline Trained whole_steps(const Config& config,
                           const Setting& setting,
                           parallel::Collectives* ranks) {
  const auto model = fresh(setting.dtype, setting.recompute, setting.experts);
  optim::AdamW optimizer(model->params(), adamw_options(config.actor.optim), ranks);
  const Batch batch = batch_of_five();
  Layout layout{setting.share, {}};
  layout.ranks = ranks;
  std::vector<at::Tensor> before;
  for (const Param& param : model->params().params()) before.push_back(param.master.clone());
  Trained out;
  for (int step = 0; step < setting.steps; ++step) {
    if (step == 0) {
      out.first = accumulate_gradients(config, batch, all_of(batch), layout, *model);
      for (const Param& param : model->params().params()) {
        out.gradients.push_back(param.grad.clone());
      }
    }
    UpdateResult result =
        update(config, batch, all_of(batch), layout, false, 1e-3, *model, optimizer);
    if (step == 0) out.first.grad_norm = result.grad_norm;
  }
  for (size_t i = 0; i < before.size(); ++i) {
    out.changes.push_back(model->params().params()[i].master.sub(before[i]));
  }
  return out;
}

inline Trained sharded_steps(const Config& config,
                             const Setting& setting,
                             parallel::Groups& groups) {
  const auto model = fresh(setting.dtype, setting.recompute, setting.experts);
  std::vector<at::Tensor> before;
  for (const Param& param : model->params().params()) before.push_back(param.master.clone());
  parallel::FsdpOptions options = setting.options;
  options.compute = setting.dtype;
  parallel::Fsdp fsdp(
      model->params(), {&groups.data, &groups.shard, &groups.replica}, options, [&](Pass pass) {
        return model->unit_uses(pass);
      });
  optim::AdamW optimizer(fsdp.parts(), adamw_options(config.actor.optim));
  optimizer.norm_over(&groups.shard);
  const Batch batch = batch_of_five();
  Layout layout{setting.share, {}};
  layout.ranks = &groups.data;
  const at::ScalarType wide = setting.dtype == at::kDouble ? at::kDouble : at::kFloat;
  Trained out;
  for (int step = 0; step < setting.steps; ++step) {
    UpdateResult result = update(
        config, batch, all_of(batch), layout, setting.verify && step == 1, 1e-3, *model, optimizer);
    if (step > 0) continue;
    out.first = std::move(result);
    out.shard = groups.shard.traffic();
    out.replica = groups.replica.traffic();
    out.num_gathers = fsdp.num_gathers();
    std::vector<at::Tensor> pieces;
    for (const Param& part : fsdp.parts().params()) pieces.push_back(part.grad);
    fsdp.each_of(pieces, wide, [&](const Param& /*param*/, const at::Tensor& whole) {
      out.gradients.push_back(whole.clone());
    });
  }
  std::map<std::string, at::Tensor> weights;
  fsdp.each(wide, [&](const Param& param, const at::Tensor& whole) {
    weights[param.name] = whole.clone();
  });
  // each() goes unit by unit; lists are in the order of the table.
  std::vector<at::Tensor> by_unit = std::move(out.gradients);
  out.gradients.assign(before.size(), {});
  size_t next = 0;
  const std::vector<Param>& params = model->params().params();
  for (int64_t unit = 0; unit < model->params().num_units(); ++unit) {
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].unit == unit) out.gradients[i] = by_unit[next++];
    }
  }
  for (size_t i = 0; i < before.size(); ++i) {
    out.changes.push_back(weights.at(params[i].name).sub(before[i]));
  }
  return out;
}

inline void expect_equal(const std::vector<at::Tensor>& a,
                         const std::vector<at::Tensor>& b,
                         const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << what << " " << i;
}

inline nn::Recompute full(int64_t num_layers) {
  return {.method = nn::RecomputeMethod::kUniform, .num_layers = num_layers};
}

// Numbers that a rank holds of each unit: the root and each layer.
inline std::vector<int64_t> pieces(int64_t size) {
  const auto model = fresh(at::kFloat, {});
  std::vector<int64_t> out(model->params().num_units(), 0);
  for (const Param& param : model->params().params()) out[param.unit] += param.master.numel();
  for (int64_t& piece : out) piece = (piece + size - 1) / size;
  return out;
}

inline int64_t sum(const std::vector<int64_t>& values) {
  int64_t total = 0;
  for (const int64_t value : values) total += value;
  return total;
}

}  // namespace banyan::testing::sharded
