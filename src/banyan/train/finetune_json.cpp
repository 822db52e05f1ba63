#include "banyan/train/finetune_json.h"

#include "banyan/train/config_json.h"
#include "banyan/train/config_node.h"

namespace banyan::train {
namespace {

void read_data(const ConfigNode& node, FinetuneDataConfig& data) {
  node.read("train_batch_size", data.train_batch_size);
  node.read("micro_batch_size_per_gpu", data.micro_batch_size_per_gpu);
  node.read("use_dynamic_bsz", data.use_dynamic_bsz);
  node.read("max_token_len_per_gpu", data.max_token_len_per_gpu);
}

void read_preference(const ConfigNode& node, PreferenceConfig& preference) {
  node.read("objective", preference.objective);
  node.read("beta", preference.beta);
  node.read("label_smoothing", preference.label_smoothing);
  node.read("reference_free", preference.reference_free);
  node.read("rpo_alpha", preference.rpo_alpha);
  node.read("reference_path", preference.reference_path);
  node.read("precompute_ref_log_probs", preference.precompute_ref_log_probs);
  node.read("center_rewards_coefficient", preference.center_rewards_coefficient);
  node.read("head_seed", preference.head_seed);
}

void read_trainer(const ConfigNode& node, FinetuneTrainerConfig& trainer) {
  read_any_trainer(node, trainer);
  node.read("max_ckpt_to_keep", trainer.max_ckpt_to_keep);
}

}  // namespace

FinetuneConfig finetune_config_from_json(const std::string& text) {
  const Json root = Json::parse(text);
  const auto node = [&](const std::string& prefix) { return ConfigNode(root, prefix); };
  FinetuneConfig config;
  node("model.").read("path", config.model.path);
  node("model.").read("enable_gradient_checkpointing", config.model.enable_gradient_checkpointing);
  read_data(node("data."), config.data);
  node("engine.").read("dtype", config.dtype);
  read_fsdp(node("engine."), config.engine);
  read_megatron(node("engine."), config.megatron);
  read_stages(node("engine.override_transformer_config."), config.stages);
  node("engine.").read("strategy", config.strategy);
  node("engine.").read("ulysses_sequence_parallel_size", config.ulysses_sequence_parallel_size);
  read_optim(node("optim."), config.optim);
  read_sharing(node("sharing."), config.sharing);
  node("sharing.").read("margin", config.sharing_margin);
  if (root.contains("preference")) {
    read_preference(node("preference."), config.preference.emplace());
  }
  read_trainer(node("trainer."), config.trainer);
  node("banyan.").read("kernels", config.kernels);
  node("banyan.").read("offload_dir", config.offload_dir);
  node("banyan.").read("fsdp_reduce_each_block", config.fsdp_reduce_each_block);
  node("banyan.").read("max_nonfinite_steps", config.max_nonfinite_steps);
  node("_shell.").read("num_train_rows", config.num_train_rows);
  node("_shell.").read("num_val_rows", config.num_val_rows);
  return config;
}

}  // namespace banyan::train
