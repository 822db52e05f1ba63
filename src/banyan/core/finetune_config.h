// The configuration of training on given text: `banyan sft`, `banyan dpo`, `banyan reward-model`.
// As in config.h, field names are the keys, each struct says which node of the tree it mirrors, and
// there are no defaults here: train/finetune_json.cpp fills the structs from the resolved tree
// (python/banyan/conf/sft_trainer.yaml and dpo_trainer.yaml).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "banyan/core/config.h"

namespace banyan {

struct FinetuneDataConfig {  // data
  int64_t train_batch_size;  // rows of one optimizer step
  int64_t micro_batch_size_per_gpu;
  bool use_dynamic_bsz;
  std::optional<int64_t> max_token_len_per_gpu;  // empty: what the free memory holds
};

struct PreferenceConfig {  // preference
  std::string objective;   // dpo | ipo | reward_model
  double beta;
  double label_smoothing;
  bool reference_free;
  double rpo_alpha;
  std::optional<std::string> reference_path;
  bool precompute_ref_log_probs;
  double center_rewards_coefficient;
  uint64_t head_seed;
};

struct FinetuneTrainerConfig {  // trainer
  int64_t total_epochs;
  std::optional<int64_t> total_training_steps;
  int64_t save_freq;
  int64_t test_freq;
  bool val_before_train;
  std::string default_local_dir;
  std::string resume_mode;  // auto | disable | resume_path
  std::optional<std::string> resume_from_path;
  std::optional<int64_t> max_ckpt_to_keep;
  std::string device;  // cpu | cuda | npu
};

struct FinetuneConfig {
  ModelConfig model;  // model.path
  FinetuneDataConfig data;
  FsdpConfig engine;
  std::string dtype;                           // engine.dtype: bfloat16 | float32
  std::optional<std::string> strategy;         // engine.strategy: fsdp | fsdp2 | megatron
  int64_t ulysses_sequence_parallel_size;      // engine.ulysses_sequence_parallel_size
  MegatronConfig megatron;                     // of verl's other engine, in the same node
  StagesConfig stages;                         // of the override_transformer_config in it
  OptimConfig optim;                           // optim
  SharingConfig sharing;                       // sharing
  double sharing_margin;                       // sharing.margin
  std::optional<PreferenceConfig> preference;  // empty: SFT
  FinetuneTrainerConfig trainer;
  std::string kernels;                     // banyan.kernels: native | aten
  std::optional<std::string> offload_dir;  // banyan.offload_dir
  bool fsdp_reduce_each_block;             // banyan.fsdp_reduce_each_block
  int64_t max_nonfinite_steps;             // banyan.max_nonfinite_steps
  int64_t num_train_rows;                  // filled by the shell
  int64_t num_val_rows;                    // filled by the shell; 0: no validation
};

}  // namespace banyan
