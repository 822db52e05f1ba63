#include "banyan/train/config_json.h"

#include "banyan/core/error.h"
#include "banyan/train/config_node.h"

namespace banyan::train {
namespace {

void read_actor(const ConfigNode& node, ActorConfig& actor) {
  node.read("ppo_mini_batch_size", actor.ppo_mini_batch_size);
  node.read("ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu);
  node.read("use_dynamic_bsz", actor.use_dynamic_bsz);
  node.read("ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu);
  node.read("ppo_epochs", actor.ppo_epochs);
  node.read("shuffle", actor.shuffle);
  node.read("data_loader_seed", actor.data_loader_seed);
  node.read("clip_ratio", actor.clip_ratio);
  node.read("clip_ratio_low", actor.clip_ratio_low);
  node.read("clip_ratio_high", actor.clip_ratio_high);
  node.read("clip_ratio_c", actor.clip_ratio_c);
  node.read("loss_agg_mode", actor.loss_agg_mode);
  node.read("loss_scale_factor", actor.loss_scale_factor);
  node.read("tau_pos", actor.tau_pos);
  node.read("tau_neg", actor.tau_neg);
  node.read("entropy_coeff", actor.entropy_coeff);
  node.read("calculate_sum_pi_squared", actor.calculate_sum_pi_squared);
  node.read("use_kl_loss", actor.use_kl_loss);
  node.read("kl_loss_coef", actor.kl_loss_coef);
  node.read("kl_loss_type", actor.kl_loss_type);
}

void read_policy_loss(const ConfigNode& node, PolicyLossConfig& loss) {
  node.read("loss_mode", loss.loss_mode);
  node.read("dppo_ratio_cap", loss.dppo_ratio_cap);
  node.read("clip_cov_ratio", loss.clip_cov_ratio);
  node.read("clip_cov_lb", loss.clip_cov_lb);
  node.read("clip_cov_ub", loss.clip_cov_ub);
  node.read("kl_cov_ratio", loss.kl_cov_ratio);
  node.read("ppo_kl_coef", loss.ppo_kl_coef);
  node.read("dro_beta", loss.dro_beta);
}

void read_critic(const ConfigNode& node, CriticConfig& critic) {
  node.read("enable", critic.enable);
  node.read("ppo_mini_batch_size", critic.ppo_mini_batch_size);
  node.read("ppo_micro_batch_size_per_gpu", critic.ppo_micro_batch_size_per_gpu);
  node.read("use_dynamic_bsz", critic.use_dynamic_bsz);
  node.read("ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu);
  node.read("ppo_epochs", critic.ppo_epochs);
  node.read("shuffle", critic.shuffle);
  node.read("data_loader_seed", critic.data_loader_seed);
  node.read("cliprange_value", critic.cliprange_value);
  node.read("loss_agg_mode", critic.loss_agg_mode);
  node.read("loss_scale_factor", critic.loss_scale_factor);
}

void read_router(const ConfigNode& node, RouterConfig& router) {
  node.read("moe_aux_loss_coeff", router.moe_aux_loss_coeff);
  node.read("moe_z_loss_coeff", router.moe_z_loss_coeff);
  node.read("moe_router_dtype", router.moe_router_dtype);
}

void read_algorithm(const ConfigNode& node, AlgorithmConfig& algorithm) {
  node.read("adv_estimator", algorithm.adv_estimator);
  node.read("norm_adv_by_std_in_grpo", algorithm.norm_adv_by_std_in_grpo);
  node.read("gamma", algorithm.gamma);
  node.read("lam", algorithm.lam);
  node.read("gdpo_reward_keys", algorithm.gdpo_reward_keys);
  node.read("gdpo_reward_weights", algorithm.gdpo_reward_weights);
  node.read("use_kl_in_reward", algorithm.use_kl_in_reward);
  node.read("kl_penalty", algorithm.kl_penalty);
  node.read("kl_ctrl.type", algorithm.kl_ctrl.type);
  node.read("kl_ctrl.kl_coef", algorithm.kl_ctrl.kl_coef);
  node.read("kl_ctrl.horizon", algorithm.kl_ctrl.horizon);
  node.read("kl_ctrl.target_kl", algorithm.kl_ctrl.target_kl);
  node.read("use_pf_ppo", algorithm.use_pf_ppo);
  node.read("pf_ppo.reweight_method", algorithm.pf_ppo.reweight_method);
  node.read("pf_ppo.weight_pow", algorithm.pf_ppo.weight_pow);
  FilterGroupsConfig& filter = algorithm.filter_groups;
  node.read("filter_groups.enable", filter.enable);
  node.read("filter_groups.metric", filter.metric);
  node.read("filter_groups.max_num_gen_batches", filter.max_num_gen_batches);
}

void read_correction(const ConfigNode& node, CorrectionConfig& correction) {
  node.read("rollout_is", correction.rollout_is);
  node.read("rollout_is_threshold", correction.rollout_is_threshold);
  node.read("rollout_is_batch_normalize", correction.rollout_is_batch_normalize);
  node.read("rollout_rs", correction.rollout_rs);
  node.read("rollout_rs_threshold", correction.rollout_rs_threshold);
  node.read("bypass_mode", correction.bypass_mode);
}

void read_sampling(const ConfigNode& node, const std::string& prefix, SamplingConfig& sampling) {
  node.read(prefix + "temperature", sampling.temperature);
  node.read(prefix + "top_p", sampling.top_p);
  node.read(prefix + "top_k", sampling.top_k);
  node.read(prefix + "do_sample", sampling.do_sample);
  node.read(prefix + "n", sampling.n);
}

void read_rollout(const ConfigNode& node, RolloutConfig& rollout) {
  read_sampling(node, "", rollout.train);
  read_sampling(node, "val_kwargs.", rollout.validation);
  node.read("response_length", rollout.response_length);
  node.read("seed", rollout.seed);
  node.read("ignore_eos", rollout.ignore_eos);
  node.read("gpu_memory_utilization", rollout.gpu_memory_utilization);
  node.read("max_num_seqs", rollout.max_num_seqs);
  node.read("max_num_batched_tokens", rollout.max_num_batched_tokens);
  node.read("max_model_len", rollout.max_model_len);
  node.read("enable_chunked_prefill", rollout.enable_chunked_prefill);
  node.read("enable_prefix_caching", rollout.enable_prefix_caching);
  node.read("scheduling_policy", rollout.scheduling_policy);
  node.read("repetition_penalty", rollout.repetition_penalty);
  node.read("over_sample_rate", rollout.over_sample_rate);
  node.read("enable_sleep_mode", rollout.enable_sleep_mode);
  node.read("free_cache_engine", rollout.free_cache_engine);
  node.read("dtype", rollout.dtype);
  node.read("nnodes", rollout.nnodes);
  node.read("n_gpus_per_node", rollout.n_gpus_per_node);
  node.read("tensor_model_parallel_size", rollout.tensor_model_parallel_size);
  node.read("data_parallel_size", rollout.data_parallel_size);
  node.read("expert_parallel_size", rollout.expert_parallel_size);
}

void read_engine(const ConfigNode& node, EngineConfig& engine) {
  node.read("kv_cache_memory_bytes", engine.kv_cache_memory_bytes);
  node.read("mem_fraction_static", engine.mem_fraction_static);
  node.read("host_kv_bytes", engine.host_kv_bytes);
  node.read("long_prefill_token_threshold", engine.long_prefill_token_threshold);
  node.read("prefill_schedule_interval", engine.prefill_schedule_interval);
  node.read("watermark", engine.watermark);
  node.read("schedule_conservativeness", engine.schedule_conservativeness);
  node.read("grouped_attention", engine.grouped_attention);
}

void read_trainer(const ConfigNode& node, TrainerConfig& trainer) {
  read_any_trainer(node, trainer);
  node.read("critic_warmup", trainer.critic_warmup);
  node.read("max_actor_ckpt_to_keep", trainer.max_actor_ckpt_to_keep);
}

void read_trainer_v1(const ConfigNode& node, TrainerV1Config& trainer) {
  node.read("trainer_mode", trainer.trainer_mode);
  node.read("separate_async.num_warmup_batches", trainer.separate_async.num_warmup_batches);
  node.read("separate_async.parameter_sync_step", trainer.separate_async.parameter_sync_step);
}

void read_skip(const ConfigNode& node, SkipRolloutConfig& skip) {
  node.read("enable", skip.enable);
  node.read("dump_dir", skip.dump_dir);
  node.read("steps", skip.steps);
  node.read("action", skip.action);
}

}  // namespace

void read_fsdp(const ConfigNode& node, FsdpConfig& fsdp) {
  node.read("param_offload", fsdp.param_offload);
  node.read("grad_offload", fsdp.grad_offload);
  node.read("optimizer_offload", fsdp.optimizer_offload);
  node.read("offload_policy", fsdp.offload_policy);
  node.read("reshard_after_forward", fsdp.reshard_after_forward);
  node.read("forward_prefetch", fsdp.forward_prefetch);
  node.read("fsdp_size", fsdp.fsdp_size);
}

void read_megatron(const ConfigNode& node, MegatronConfig& megatron) {
  node.read("param_offload", megatron.param_offload);
  node.read("grad_offload", megatron.grad_offload);
  node.read("optimizer_offload", megatron.optimizer_offload);
  node.read("tensor_model_parallel_size", megatron.tensor_model_parallel_size);
  node.read("sequence_parallel", megatron.sequence_parallel);
  node.read("context_parallel_size", megatron.context_parallel_size);
  node.read("pipeline_model_parallel_size", megatron.pipeline_model_parallel_size);
  node.read("virtual_pipeline_model_parallel_size", megatron.virtual_pipeline_model_parallel_size);
  node.read("expert_model_parallel_size", megatron.expert_model_parallel_size);
  node.read("expert_tensor_parallel_size", megatron.expert_tensor_parallel_size);
  const std::string override = "override_transformer_config.";
  RecomputeConfig& recompute = megatron.recompute;
  node.read(override + "recompute_granularity", recompute.recompute_granularity);
  node.read(override + "recompute_method", recompute.recompute_method);
  node.read(override + "recompute_num_layers", recompute.recompute_num_layers);
  node.read(override + "recompute_modules", recompute.recompute_modules);
}

void read_stages(const ConfigNode& node, StagesConfig& stages) {
  node.read("num_layers_in_first_pipeline_stage", stages.num_layers_in_first_pipeline_stage);
  node.read("num_layers_in_last_pipeline_stage", stages.num_layers_in_last_pipeline_stage);
  node.read("num_layers_per_virtual_pipeline_stage", stages.num_layers_per_virtual_pipeline_stage);
  node.read("account_for_embedding_in_pipeline_split",
            stages.account_for_embedding_in_pipeline_split);
  node.read("account_for_loss_in_pipeline_split", stages.account_for_loss_in_pipeline_split);
}

void read_optim(const ConfigNode& node, OptimConfig& optim) {
  node.read("lr", optim.lr);
  node.read("lr_warmup_steps_ratio", optim.lr_warmup_steps_ratio);
  node.read("lr_warmup_steps", optim.lr_warmup_steps);
  node.read("lr_scheduler_type", optim.lr_scheduler_type);
  node.read("min_lr_ratio", optim.min_lr_ratio);
  node.read("num_cycles", optim.num_cycles);
  node.read("zero_indexed_step", optim.zero_indexed_step);
  node.read("weight_decay", optim.weight_decay);
  node.read("betas", optim.betas);
  node.read("clip_grad", optim.clip_grad);
  BANYAN_CHECK(optim.betas.size() == 2,
               "[config] ",
               node.prefix(),
               "betas: wanted 2 numbers, got ",
               optim.betas.size());
}

void read_sharing(const ConfigNode& node, SharingConfig& sharing) {
  node.read("mode", sharing.mode);
  node.read("min_prefix_len", sharing.min_prefix_len);
  node.read("min_group_size", sharing.min_group_size);
  node.read("carry", sharing.carry);
  node.read("max_tokens_per_block", sharing.max_tokens_per_block);
  node.read("max_path_tokens", sharing.max_path_tokens);
}

Config config_from_json(const std::string& text) {
  const Json root = Json::parse(text);
  const auto node = [&](const std::string& prefix) { return ConfigNode(root, prefix); };
  Config config;
  node("_shell.").read("model_dir", config.model.path);
  node("actor_rollout_ref.model.")
      .read("enable_gradient_checkpointing", config.model.enable_gradient_checkpointing);
  node("actor_rollout_ref.ref.model.").read("path", config.ref_model_path);
  node("actor_rollout_ref.ref.fsdp_config.").read("param_offload", config.ref_fsdp_param_offload);
  const ConfigNode reference = node("actor_rollout_ref.ref.megatron.");
  reference.read("param_offload", config.ref_megatron_param_offload);
  reference.read("tensor_model_parallel_size", config.ref_tensor_model_parallel_size);
  reference.read("sequence_parallel", config.ref_sequence_parallel);
  reference.read("context_parallel_size", config.ref_context_parallel_size);
  reference.read("pipeline_model_parallel_size", config.ref_pipeline_model_parallel_size);
  reference.read("virtual_pipeline_model_parallel_size",
                 config.ref_virtual_pipeline_model_parallel_size);
  reference.read("expert_model_parallel_size", config.ref_expert_model_parallel_size);
  reference.read("expert_tensor_parallel_size", config.ref_expert_tensor_parallel_size);
  read_sharing(node("actor_rollout_ref.sharing."), config.sharing);
  node("actor_rollout_ref.sharing.").read("detector", config.sharing.detector);
  node("actor_rollout_ref.sharing.").read("verify", config.sharing.verify);
  node("actor_rollout_ref.sharing.").read("observe", config.sharing.observe);
  node("actor_rollout_ref.sharing.").read("margin", config.sharing_margin);
  read_actor(node("actor_rollout_ref.actor."), config.actor);
  read_optim(node("actor_rollout_ref.actor.optim."), config.actor.optim);
  read_fsdp(node("actor_rollout_ref.actor.fsdp_config."), config.actor.fsdp);
  node("actor_rollout_ref.actor.").read("strategy", config.actor.strategy);
  read_megatron(node("actor_rollout_ref.actor.megatron."), config.actor.megatron);
  read_router(node("actor_rollout_ref.actor.megatron.override_transformer_config."),
              config.actor.router);
  read_stages(node("actor_rollout_ref.actor.megatron.override_transformer_config."),
              config.actor.stages);
  read_policy_loss(node("actor_rollout_ref.actor.policy_loss."), config.actor.policy_loss);
  read_critic(node("critic."), config.critic);
  read_optim(node("critic.optim."), config.critic.optim);
  read_fsdp(node("critic.fsdp."), config.critic.fsdp);
  node("critic.").read("strategy", config.critic.strategy);
  node("actor_rollout_ref.ref.").read("strategy", config.ref_strategy);
  const std::string ulysses = "ulysses_sequence_parallel_size";
  node("actor_rollout_ref.actor.").read(ulysses, config.actor.ulysses_sequence_parallel_size);
  node("actor_rollout_ref.ref.").read(ulysses, config.ref_ulysses_sequence_parallel_size);
  node("critic.").read(ulysses, config.critic.ulysses_sequence_parallel_size);
  read_megatron(node("critic.megatron."), config.critic.megatron);
  node("critic.model.").read("path", config.critic_model_path);
  node("critic.model.").read("enable_gradient_checkpointing", config.critic_gradient_checkpointing);
  read_rollout(node("actor_rollout_ref.rollout."), config.rollout);
  read_engine(node("banyan.engine."), config.engine);
  read_algorithm(node("algorithm."), config.algorithm);
  read_correction(node("algorithm.rollout_correction."), config.algorithm.rollout_correction);
  node("reward.reward_model.").read("enable", config.reward_model.enable);
  node("reward.reward_model.").read("model_path", config.reward_model.model_path);
  read_trainer(node("trainer."), config.trainer);
  read_trainer_v1(node("trainer.v1."), config.trainer_v1);
  read_skip(node("skip.rollout."), config.skip_rollout);
  node("trainer.v1.sampler.").read("max_off_policy_threshold", config.max_off_policy_threshold);
  node("actor_rollout_ref.").read("hybrid_engine", config.hybrid_engine);
  node("data.").read("train_batch_size", config.train_batch_size);
  node("data.").read("max_prompt_length", config.max_prompt_length);
  node("_shell.").read("num_train_rows", config.num_train_rows);
  node("_shell.").read("stop_ids", config.stop_ids);
  node("banyan.").read("kernels", config.kernels);
  node("banyan.").read("offload_dir", config.offload_dir);
  node("banyan.").read("fsdp_reduce_each_block", config.fsdp_reduce_each_block);
  node("banyan.").read("force_old_log_prob", config.force_old_log_prob);
  node("banyan.").read("partial_rollout", config.partial_rollout);
  node("banyan.").read("max_nonfinite_steps", config.max_nonfinite_steps);
  node("banyan.reward.").read("max_failed_frac", config.max_failed_frac);
  return config;
}

}  // namespace banyan::train
