#include "banyan/train/memory_keys.h"

#include <algorithm>
#include <array>

#include "banyan/core/error.h"

namespace banyan::train {
namespace {

// Megatron's names. What has no memory of its own here, or belongs to layers that banyan's models
// lack, changes nothing.
constexpr std::array<const char*, 7> kModules = {
    "core_attn", "mlp", "layernorm", "moe", "moe_act", "mla_up_proj", "shared_experts"};

nn::Recompute full(const RecomputeConfig& keys, const std::string& node) {
  const std::string method = keys.recompute_method.value_or("null");
  BANYAN_CHECK(method == "uniform" || method == "block",
               "[config] ",
               node,
               ".recompute_method: wanted uniform or block with recompute_granularity=full, got ",
               method);
  BANYAN_CHECK(
      keys.recompute_num_layers.value_or(0) >= 1,
      "[config] ",
      node,
      ".recompute_num_layers: wanted a number of layers with recompute_granularity=full, got ",
      keys.recompute_num_layers ? std::to_string(*keys.recompute_num_layers) : "null");
  return {.method = method == "block" ? nn::RecomputeMethod::kBlock : nn::RecomputeMethod::kUniform,
          .num_layers = *keys.recompute_num_layers};
}

nn::Recompute selective(const RecomputeConfig& keys, const std::string& node) {
  BANYAN_CHECK(
      !keys.recompute_num_layers,
      "[config] ",
      node,
      ".recompute_num_layers: wanted null with recompute_granularity=selective, which acts in "
      "every layer, got ",
      *keys.recompute_num_layers);
  const std::vector<std::string>& modules = keys.recompute_modules;
  for (const std::string& module : modules) {
    BANYAN_CHECK(std::find(kModules.begin(), kModules.end(), module) != kModules.end(),
                 "[config] ",
                 node,
                 ".recompute_modules: wanted some of core_attn, mlp, layernorm, moe, moe_act, "
                 "mla_up_proj and shared_experts, got ",
                 module);
  }
  const auto names = [&](const char* module) {
    return std::find(modules.begin(), modules.end(), module) != modules.end();
  };
  return {.method = nn::RecomputeMethod::kSelective,
          .core_attn = names("core_attn"),
          .mlp = names("mlp"),
          .moe = names("moe")};
}

}  // namespace

nn::Recompute recompute_of(bool checkpointing,
                           const RecomputeConfig& recompute,
                           const std::string& node) {
  if (recompute.recompute_granularity) {
    const std::string& granularity = *recompute.recompute_granularity;
    if (granularity == "full") return full(recompute, node);
    BANYAN_CHECK(granularity == "selective",
                 "[config] ",
                 node,
                 ".recompute_granularity: wanted full, selective or null, got ",
                 granularity);
    return selective(recompute, node);
  }
  if (!checkpointing) return {};
  return {.method = nn::RecomputeMethod::kUniform, .num_layers = 1};
}

nn::Recompute actor_recompute(const Config& config) {
  return recompute_of(config.model.enable_gradient_checkpointing,
                      config.actor.megatron.recompute,
                      "actor_rollout_ref.actor.megatron.override_transformer_config");
}

nn::Recompute critic_recompute(const Config& config) {
  return recompute_of(config.critic_gradient_checkpointing,
                      config.critic.megatron.recompute,
                      "critic.megatron.override_transformer_config");
}

}  // namespace banyan::train
