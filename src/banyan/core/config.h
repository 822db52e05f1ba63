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
};

struct SharingConfig {  // actor_rollout_ref.sharing
  std::string mode;     // auto | on | off
  int64_t min_prefix_len;
  int64_t min_group_size;
};

struct OptimConfig {  // actor_rollout_ref.actor.optim
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

struct ActorConfig {                                    // actor_rollout_ref.actor
  int64_t ppo_mini_batch_size;                          // prompts; times rollout.n samples
  std::optional<int64_t> ppo_micro_batch_size_per_gpu;  // samples that end in one block
  bool use_dynamic_bsz;
  int64_t ppo_max_token_len_per_gpu;  // tokens of one block, when use_dynamic_bsz or no micro-batch
                                      // size is set
  int64_t ppo_epochs;
  bool shuffle;
  uint64_t data_loader_seed;
  double clip_ratio;
  std::optional<double> clip_ratio_low;
  std::optional<double> clip_ratio_high;
  double clip_ratio_c;
  std::string loss_agg_mode;
  std::optional<double> loss_scale_factor;
  std::string loss_mode;  // policy_loss.loss_mode
  double entropy_coeff;
  bool use_kl_loss;
  double kl_loss_coef;
  std::string kl_loss_type;
  OptimConfig optim;
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
  std::string dtype;  // bfloat16 | float32: compute type of actor and rollout alike
};

struct AlgorithmConfig {  // algorithm
  std::string adv_estimator;
  bool norm_adv_by_std_in_grpo;
};

struct TrainerConfig {  // trainer
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

struct Config {
  ModelConfig model;
  std::optional<std::string>
      ref_model_path;  // actor_rollout_ref.ref.model.path; the actor's start otherwise
  SharingConfig sharing;
  ActorConfig actor;
  RolloutConfig rollout;
  AlgorithmConfig algorithm;
  TrainerConfig trainer;
  int64_t train_batch_size;       // data.train_batch_size, prompts
  int64_t max_prompt_length;      // data.max_prompt_length
  int64_t num_train_rows;         // filled by the shell: rows after filtering
  std::vector<int32_t> stop_ids;  // filled by the shell: EOS ids of tokenizer and generation config
  std::string kernels;            // banyan.kernels: native | aten
  bool force_old_log_prob;        // banyan.force_old_log_prob: always run the old-log-prob pass
  int64_t max_nonfinite_steps;  // banyan.max_nonfinite_steps: stop after that many skipped updates
                                // in a row
  double max_failed_frac;       // banyan.reward.max_failed_frac
};

}  // namespace banyan
