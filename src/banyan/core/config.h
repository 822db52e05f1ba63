// The configuration of a run, as the core reads it. Field names are verl's keys; each struct says
// which node of the tree it mirrors. There are no defaults here: values come from the resolved tree
// (python/banyan/conf/*.yaml), through train/config_json.cpp, the one function that fills these
// structs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace banyan {

struct ModelConfig {  // actor_rollout_ref.model
  std::string path;   // HF directory
  bool enable_gradient_checkpointing;
};

struct RecomputeConfig {  // actor_rollout_ref.actor.megatron.override_transformer_config
  std::optional<std::string> recompute_granularity;  // full | selective
  std::optional<std::string> recompute_method;       // uniform | block
  std::optional<int64_t> recompute_num_layers;
  std::vector<std::string> recompute_modules;
};

struct RouterConfig {  // actor_rollout_ref.actor.megatron.override_transformer_config
  std::optional<double> moe_aux_loss_coeff;
  std::optional<double> moe_z_loss_coeff;
  std::optional<std::string> moe_router_dtype;  // fp32 | fp64
};

struct StagesConfig {  // actor_rollout_ref.actor.megatron.override_transformer_config
  std::optional<int64_t> num_layers_in_first_pipeline_stage;
  std::optional<int64_t> num_layers_in_last_pipeline_stage;
  std::optional<int64_t> num_layers_per_virtual_pipeline_stage;
  bool account_for_embedding_in_pipeline_split;
  bool account_for_loss_in_pipeline_split;
};

struct MegatronConfig {  // actor_rollout_ref.actor.megatron, critic.megatron
  bool param_offload;
  bool grad_offload;
  bool optimizer_offload;
  RecomputeConfig recompute;
  int64_t tensor_model_parallel_size;
  bool sequence_parallel;  // with a tensor_model_parallel_size above 1
  int64_t context_parallel_size;
  int64_t pipeline_model_parallel_size;
  std::optional<int64_t> virtual_pipeline_model_parallel_size;
  int64_t expert_model_parallel_size;
  std::optional<int64_t> expert_tensor_parallel_size;  // empty: tensor_model_parallel_size
};

struct FsdpConfig {  // actor_rollout_ref.actor.fsdp_config, critic.fsdp
  bool param_offload;
  bool grad_offload;
  bool optimizer_offload;
  bool offload_policy;  // all three
  bool reshard_after_forward;
  bool forward_prefetch;
  int64_t fsdp_size;  // ranks that hold one copy of the weights; <= 0: all
};

struct SharingConfig {  // actor_rollout_ref.sharing
  std::string mode;     // auto | on | off
  int64_t min_prefix_len;
  int64_t min_group_size;
  std::string carry;             // auto | retain | recompute | replay: what a cut trunk costs
  int64_t max_tokens_per_block;  // tokens of one block; 0: the micro-batch's limit
  int64_t max_path_tokens;       // longest sample a plan takes; 0: any
  std::string detector;          // trie | trie_online: rule of the provider/reuser view
  std::string verify;   // off | first | every:N: compare gradients with those without sharing
  std::string observe;  // off | summary | layer | profile | debug: level of the [PS] lines
};

struct OptimConfig {  // actor_rollout_ref.actor.optim, critic.optim
  double lr;
  double lr_warmup_steps_ratio;
  int64_t lr_warmup_steps;
  std::string lr_scheduler_type;  // constant | linear | cosine
  double min_lr_ratio;
  double num_cycles;
  bool zero_indexed_step;
  double weight_decay;
  std::vector<double> betas;  // two
  double clip_grad;
};

struct PolicyLossConfig {  // actor_rollout_ref.actor.policy_loss
  std::string loss_mode;   // a registered name, or "file.py:function"
  double dppo_ratio_cap;
  double clip_cov_ratio;
  double clip_cov_lb;
  double clip_cov_ub;
  double kl_cov_ratio;
  double ppo_kl_coef;
  std::optional<double> dro_beta;
};

struct ActorConfig {                                    // actor_rollout_ref.actor
  int64_t ppo_mini_batch_size;                          // prompts; times rollout.n samples
  std::optional<int64_t> ppo_micro_batch_size_per_gpu;  // samples that end in one block
  bool use_dynamic_bsz;
  // Tokens of one block, when use_dynamic_bsz or no micro-batch size is set; empty: what the free
  // memory holds (train/token_budget.h).
  std::optional<int64_t> ppo_max_token_len_per_gpu;
  int64_t ppo_epochs;
  bool shuffle;
  uint64_t data_loader_seed;
  double clip_ratio;
  std::optional<double> clip_ratio_low;
  std::optional<double> clip_ratio_high;
  double clip_ratio_c;
  std::optional<std::string> loss_agg_mode;  // empty: the policy loss's own, or token-mean
  std::optional<double> loss_scale_factor;
  double tau_pos;
  double tau_neg;
  PolicyLossConfig policy_loss;
  double entropy_coeff;
  bool calculate_sum_pi_squared;
  bool use_kl_loss;
  double kl_loss_coef;
  std::string kl_loss_type;
  OptimConfig optim;
  FsdpConfig fsdp;
  MegatronConfig megatron;
  RouterConfig router;
  StagesConfig stages;
  std::optional<std::string> strategy;  // fsdp | fsdp2 | megatron
  int64_t ulysses_sequence_parallel_size;
};

struct CriticConfig {          // critic
  std::optional<bool> enable;  // empty: if the advantage estimator needs values
  int64_t ppo_mini_batch_size;
  std::optional<int64_t> ppo_micro_batch_size_per_gpu;
  bool use_dynamic_bsz;
  std::optional<int64_t> ppo_max_token_len_per_gpu;
  int64_t ppo_epochs;
  bool shuffle;
  uint64_t data_loader_seed;
  double cliprange_value;
  std::optional<std::string> loss_agg_mode;  // empty: token-mean
  std::optional<double> loss_scale_factor;
  OptimConfig optim;
  FsdpConfig fsdp;
  MegatronConfig megatron;
  std::optional<std::string> strategy;  // empty: the actor's
  int64_t ulysses_sequence_parallel_size;
};

struct SamplingConfig {  // actor_rollout_ref.rollout and its val_kwargs
  double temperature;
  double top_p;
  int64_t top_k;
  bool do_sample;
  int64_t n;
};

struct RolloutConfig {  // actor_rollout_ref.rollout
  SamplingConfig train;
  SamplingConfig validation;  // val_kwargs
  int64_t response_length;
  uint64_t seed;
  bool ignore_eos;
  double gpu_memory_utilization;
  int64_t max_num_seqs;
  int64_t max_num_batched_tokens;
  std::optional<int64_t> max_model_len;
  bool enable_chunked_prefill;
  bool enable_prefix_caching;
  std::string scheduling_policy;  // group | fcfs | priority
  double repetition_penalty;      // training and validation
  double over_sample_rate;        // share of a batch's groups that may be left unfinished
  bool enable_sleep_mode;
  bool free_cache_engine;  // with enable_sleep_mode: the pool's memory is given back between phases
  std::string dtype;       // bfloat16 | float32: compute type of actor and rollout alike
  int64_t nnodes;          // ranks that only generate are nnodes times n_gpus_per_node
  std::optional<int64_t> n_gpus_per_node;
  int64_t tensor_model_parallel_size;  // ranks that hold one rollout model together
  int64_t data_parallel_size;          // such groups that share its experts
  int64_t expert_parallel_size;        // 1, or all ranks of those groups
};

struct EngineConfig {                            // banyan.engine, what verl has in engine_kwargs
  std::optional<int64_t> kv_cache_memory_bytes;  // before the two shares of the memory
  std::optional<double> mem_fraction_static;     // before gpu_memory_utilization
  int64_t host_kv_bytes;                         // -1: beside an accelerator as much as the pool
  int64_t long_prefill_token_threshold;          // 0: no limit
  int64_t prefill_schedule_interval;
  double watermark;
  double schedule_conservativeness;
  bool grouped_attention;
};

struct KlControlConfig {  // algorithm.kl_ctrl
  std::string type;       // fixed | adaptive
  double kl_coef;
  double horizon;
  double target_kl;
};

struct ResampleConfig {         // algorithm.pf_ppo
  std::string reweight_method;  // pow | max_min | max_random
  double weight_pow;
};

struct FilterGroupsConfig {  // algorithm.filter_groups
  bool enable;
  std::optional<std::string> metric;  // empty: reward
  int64_t max_num_gen_batches;        // 0: no limit
};

struct CorrectionConfig {                 // algorithm.rollout_correction
  std::optional<std::string> rollout_is;  // token | sequence
  std::optional<std::string> rollout_is_threshold;
  bool rollout_is_batch_normalize;
  std::optional<std::string> rollout_rs;
  std::optional<std::string> rollout_rs_threshold;
  bool bypass_mode;
};

struct AlgorithmConfig {      // algorithm
  std::string adv_estimator;  // a registered name, or "file.py:function"
  bool norm_adv_by_std_in_grpo;
  double gamma;
  double lam;
  std::optional<std::vector<std::string>> gdpo_reward_keys;
  std::optional<std::vector<double>> gdpo_reward_weights;
  bool use_kl_in_reward;
  std::string kl_penalty;
  KlControlConfig kl_ctrl;
  bool use_pf_ppo;
  ResampleConfig pf_ppo;
  FilterGroupsConfig filter_groups;
  CorrectionConfig rollout_correction;
};

struct RewardModelConfig {  // reward.reward_model
  bool enable;
  std::optional<std::string> model_path;
};

struct TrainerConfig {  // trainer
  int64_t critic_warmup;
  int64_t total_epochs;
  std::optional<int64_t> total_training_steps;
  int64_t save_freq;
  int64_t test_freq;
  bool val_before_train;
  std::string default_local_dir;
  std::string resume_mode;  // auto | disable | resume_path
  std::optional<std::string> resume_from_path;
  std::optional<int64_t> max_actor_ckpt_to_keep;
  std::string device;  // cpu | cuda | npu
};

struct SeparateAsyncConfig {    // trainer.v1.separate_async
  int64_t num_warmup_batches;   // that are generated ahead
  int64_t parameter_sync_step;  // updates between two hand-overs of the weights
};

struct TrainerV1Config {     // trainer.v1
  std::string trainer_mode;  // sync | separate_async
  SeparateAsyncConfig separate_async;
};

struct SkipRolloutConfig {  // skip.rollout
  bool enable;
  std::optional<std::string> dump_dir;
  std::vector<int64_t> steps;
  std::string action;  // cache
};

struct Config {
  ModelConfig model;
  std::optional<std::string>
      ref_model_path;  // actor_rollout_ref.ref.model.path; the actor's start otherwise
  std::optional<std::string> ref_strategy;  // actor_rollout_ref.ref.strategy; empty: the actor's
  bool ref_fsdp_param_offload;              // actor_rollout_ref.ref.fsdp_config.param_offload
  bool ref_megatron_param_offload;          // actor_rollout_ref.ref.megatron.param_offload
  int64_t ref_tensor_model_parallel_size;   // actor_rollout_ref.ref.megatron, and the next
  bool ref_sequence_parallel;
  int64_t ref_context_parallel_size;
  int64_t ref_ulysses_sequence_parallel_size;  // actor_rollout_ref.ref
  int64_t ref_pipeline_model_parallel_size;
  std::optional<int64_t> ref_virtual_pipeline_model_parallel_size;
  int64_t ref_expert_model_parallel_size;
  std::optional<int64_t> ref_expert_tensor_parallel_size;
  SharingConfig sharing;
  double sharing_margin;  // actor_rollout_ref.sharing.margin: auto shares if it saves this share
  ActorConfig actor;
  CriticConfig critic;
  std::optional<std::string> critic_model_path;  // critic.model.path; the actor's otherwise
  bool critic_gradient_checkpointing;            // critic.model.enable_gradient_checkpointing
  RolloutConfig rollout;
  EngineConfig engine;
  AlgorithmConfig algorithm;
  RewardModelConfig reward_model;
  TrainerConfig trainer;
  TrainerV1Config trainer_v1;
  SkipRolloutConfig skip_rollout;
  bool hybrid_engine;  // actor_rollout_ref.hybrid_engine: ranks that train generate too
  int64_t max_off_policy_threshold;  // trainer.v1.sampler.max_off_policy_threshold
  int64_t train_batch_size;          // data.train_batch_size, prompts
  int64_t max_prompt_length;         // data.max_prompt_length
  int64_t num_train_rows;            // filled by the shell: rows after filtering
  std::vector<int32_t> stop_ids;  // filled by the shell: EOS ids of tokenizer and generation config
  std::string kernels;            // banyan.kernels: native | aten
  std::optional<std::string> offload_dir;  // banyan.offload_dir: folder of what is offloaded
  bool fsdp_reduce_each_block;             // banyan.fsdp_reduce_each_block
  bool force_old_log_prob;      // banyan.force_old_log_prob: always run the old-log-prob pass
  bool partial_rollout;         // banyan.partial_rollout: what over_sample_rate cut off goes on
  int64_t max_nonfinite_steps;  // banyan.max_nonfinite_steps: stop after that many skipped updates
                                // in a row
  double max_failed_frac;       // banyan.reward.max_failed_frac
};

}  // namespace banyan
