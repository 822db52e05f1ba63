// A tiny model on disk and a complete configuration around it, for tests of the trainer and the
// checkpoint.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "banyan/core/config.h"
#include "banyan/core/finetune_config.h"
#include "banyan/core/sample.h"
#include "banyan/io/safetensors.h"
#include "banyan/models/causal_lm.h"

namespace banyan::testing {

// A folder of its own under the system's temporary folder, removed at the end.
class ScratchDir {
 public:
  explicit ScratchDir(const std::string& name) {
    std::string pattern =
        (std::filesystem::temp_directory_path() / ("banyan-" + name + "-XXXXXX")).string();
    path_ = mkdtemp(pattern.data());
  }
  ~ScratchDir() { std::filesystem::remove_all(path_); }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline std::string tiny_config_json() {
  return R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64,
             "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
             "max_position_embeddings": 512, "tie_word_embeddings": true, "hidden_act": "silu",
             "initializer_range": 0.05, "torch_dtype": "float32"})";
}

// A dense layer, and one with experts.
inline std::string tiny_moe_config_json() {
  return R"({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 96,
             "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "initializer_range": 0.05,
             "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
             "norm_topk_prob": true, "mlp_only_layers": [0], "torch_dtype": "float32"})";
}

// Writes a random tiny model as an HF directory (fp32) and returns its path.
inline std::string write_tiny_model(const ScratchDir& scratch,
                                    uint64_t seed = 1,
                                    const std::string& config = tiny_config_json()) {
  const std::string source = scratch / "source";
  std::filesystem::create_directory(source);
  std::ofstream(source + "/config.json") << config;
  const auto model = models::random_model(config, seed, {{.dtype = at::kFloat}, false});
  const std::string directory = scratch / "model";
  models::save_model(*model, source, directory, at::kFloat);
  return directory;
}

// Master weights of a checkpoint, name -> tensor.
inline std::map<std::string, at::Tensor> masters(const std::string& checkpoint) {
  const io::SafetensorsFile file(checkpoint + "/state/master.safetensors");
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, entry] : file.entries()) out[name] = file.read(name);
  return out;
}

// They share their first five tokens.
inline std::vector<std::vector<int32_t>> tiny_prompts(int32_t count = 8) {
  std::vector<std::vector<int32_t>> out;
  for (int32_t row = 0; row < count; ++row) {
    out.push_back({5, 6, 8, 9, 10, 20 + row % 60, 30 + row % 50, 40});
  }
  return out;
}

// A reward: the share of the response's tokens for which `counts` holds.
template <typename Counts>
Score share_of_tokens(const Trajectory& trajectory, const Counts& counts) {
  double sum = 0.0;
  for (const int32_t token : trajectory.response) sum += counts(token) ? 1.0 : 0.0;
  Score score;
  score.row = trajectory.row;
  score.index = trajectory.index;
  score.value = sum / static_cast<double>(trajectory.response.size());
  return score;
}

// Four prompts a step, four responses each of at most eight tokens.
inline Config tiny_config(const std::string& model_dir, const std::string& run_dir) {
  Config config;
  config.model.path = model_dir;
  config.model.enable_gradient_checkpointing = false;
  config.critic_gradient_checkpointing = false;
  config.ref_fsdp_param_offload = false;
  config.ref_megatron_param_offload = false;
  config.ref_tensor_model_parallel_size = 1;
  config.ref_sequence_parallel = false;
  config.ref_context_parallel_size = 1;
  config.ref_ulysses_sequence_parallel_size = 1;
  config.ref_pipeline_model_parallel_size = 1;
  config.ref_expert_model_parallel_size = 1;
  config.sharing = {.mode = "on",
                    .min_prefix_len = 1,
                    .min_group_size = 2,
                    .carry = "auto",
                    .max_tokens_per_block = 0,
                    .max_path_tokens = 0,
                    .detector = "trie",
                    .verify = "off",
                    .observe = "off"};
  config.sharing_margin = 0.02;
  ActorConfig& actor = config.actor;
  actor.ppo_mini_batch_size = 4;
  actor.use_dynamic_bsz = false;
  actor.ppo_max_token_len_per_gpu = 16384;
  actor.ppo_epochs = 1;
  actor.shuffle = false;
  actor.data_loader_seed = 7;
  actor.clip_ratio = 0.2;
  actor.clip_ratio_c = 3.0;
  actor.tau_pos = 1.0;
  actor.tau_neg = 1.05;
  actor.policy_loss = {.loss_mode = "vanilla",
                       .dppo_ratio_cap = 20.0,
                       .clip_cov_ratio = 0.0002,
                       .clip_cov_lb = 1.0,
                       .clip_cov_ub = 5.0,
                       .kl_cov_ratio = 0.0002,
                       .ppo_kl_coef = 0.1,
                       .dro_beta = {}};
  actor.calculate_sum_pi_squared = false;
  actor.entropy_coeff = 0.0;
  actor.use_kl_loss = false;
  actor.kl_loss_coef = 0.001;
  actor.kl_loss_type = "low_var_kl";
  actor.optim = {.lr = 1e-2,
                 .lr_warmup_steps_ratio = 0.0,
                 .lr_warmup_steps = -1,
                 .lr_scheduler_type = "constant",
                 .min_lr_ratio = 0.0,
                 .num_cycles = 0.5,
                 .zero_indexed_step = true,
                 .weight_decay = 0.0,
                 .betas = {0.9, 0.99},
                 .clip_grad = 1.0};
  actor.fsdp = {false, false, false, false, true, false, -1};
  actor.megatron = {false, false, false, {{}, {}, {}, {"core_attn"}}, 1, false, 1, 1, {}, 1, {}};
  actor.ulysses_sequence_parallel_size = 1;
  actor.stages = {{}, {}, {}, false, false};
  CriticConfig& critic = config.critic;
  critic.ppo_mini_batch_size = 4;
  critic.use_dynamic_bsz = false;
  critic.ppo_max_token_len_per_gpu = 32768;
  critic.ppo_epochs = 1;
  critic.shuffle = false;
  critic.data_loader_seed = 7;
  critic.cliprange_value = 0.5;
  critic.optim = actor.optim;
  critic.fsdp = actor.fsdp;
  critic.megatron = actor.megatron;
  critic.ulysses_sequence_parallel_size = 1;
  config.reward_model.enable = false;
  RolloutConfig& rollout = config.rollout;
  rollout.train = {.temperature = 1.0, .top_p = 1.0, .top_k = -1, .do_sample = true, .n = 4};
  rollout.validation = {.temperature = 0.0, .top_p = 1.0, .top_k = -1, .do_sample = false, .n = 1};
  rollout.response_length = 8;
  rollout.seed = 42;
  rollout.ignore_eos = false;
  rollout.gpu_memory_utilization = 0.05;
  rollout.max_num_seqs = 256;
  rollout.max_num_batched_tokens = 2048;
  rollout.enable_chunked_prefill = true;
  rollout.enable_prefix_caching = true;
  rollout.scheduling_policy = "group";
  rollout.repetition_penalty = 1.0;
  rollout.over_sample_rate = 0.0;
  rollout.enable_sleep_mode = true;
  rollout.free_cache_engine = true;
  rollout.dtype = "bfloat16";
  rollout.nnodes = 0;
  rollout.tensor_model_parallel_size = 1;
  rollout.data_parallel_size = 1;
  rollout.expert_parallel_size = 1;
  config.engine = {.kv_cache_memory_bytes = {},
                   .mem_fraction_static = {},
                   .host_kv_bytes = -1,
                   .long_prefill_token_threshold = 0,
                   .prefill_schedule_interval = 1,
                   .watermark = 0.0,
                   .schedule_conservativeness = 1.0,
                   .grouped_attention = true};
  AlgorithmConfig& algorithm = config.algorithm;
  algorithm.adv_estimator = "grpo";
  algorithm.norm_adv_by_std_in_grpo = true;
  algorithm.gamma = 1.0;
  algorithm.lam = 1.0;
  algorithm.use_kl_in_reward = false;
  algorithm.kl_penalty = "kl";
  algorithm.kl_ctrl = {.type = "fixed", .kl_coef = 0.001, .horizon = 10000.0, .target_kl = 0.1};
  algorithm.use_pf_ppo = false;
  algorithm.pf_ppo = {.reweight_method = "pow", .weight_pow = 2.0};
  algorithm.filter_groups = {.enable = false, .metric = {}, .max_num_gen_batches = 0};
  algorithm.rollout_correction.rollout_is_batch_normalize = false;
  algorithm.rollout_correction.rollout_is_threshold = "2.0";
  algorithm.rollout_correction.bypass_mode = false;
  TrainerConfig& trainer = config.trainer;
  trainer.critic_warmup = 0;
  trainer.total_epochs = 1;
  trainer.total_training_steps = 4;
  trainer.save_freq = -1;
  trainer.test_freq = -1;
  trainer.val_before_train = false;
  trainer.default_local_dir = run_dir;
  trainer.resume_mode = "auto";
  trainer.device = "cpu";
  config.trainer_v1 = {.trainer_mode = "sync",
                       .separate_async = {.num_warmup_batches = 1, .parameter_sync_step = 1}};
  config.skip_rollout = {.enable = false, .dump_dir = {}, .steps = {}, .action = "cache"};
  config.hybrid_engine = true;
  config.max_off_policy_threshold = 8;
  config.train_batch_size = 4;
  config.max_prompt_length = 64;
  config.num_train_rows = 8;
  config.stop_ids = {0};
  config.kernels = "native";
  config.force_old_log_prob = false;
  config.fsdp_reduce_each_block = true;
  config.partial_rollout = false;
  config.max_nonfinite_steps = 3;
  config.max_failed_frac = 0.2;
  return config;
}

// Training on given text: four rows a step, six steps, no checkpoint but the last.
inline FinetuneConfig tiny_finetune_config(const std::string& model_dir,
                                           const std::string& run_dir) {
  FinetuneConfig config;
  config.model.path = model_dir;
  config.data = {.train_batch_size = 4,
                 .micro_batch_size_per_gpu = 4,
                 .use_dynamic_bsz = true,
                 .max_token_len_per_gpu = 4096};
  config.dtype = "bfloat16";
  const Config other = tiny_config(model_dir, run_dir);
  config.model.enable_gradient_checkpointing = false;
  config.engine = other.actor.fsdp;
  config.megatron = other.actor.megatron;
  config.stages = other.actor.stages;
  config.ulysses_sequence_parallel_size = 1;
  config.fsdp_reduce_each_block = true;
  config.optim = other.actor.optim;
  config.sharing = other.sharing;
  config.sharing_margin = 0.02;
  config.trainer = {.total_epochs = 1,
                    .total_training_steps = 6,
                    .save_freq = -1,
                    .test_freq = -1,
                    .val_before_train = true,
                    .default_local_dir = run_dir,
                    .resume_mode = "auto",
                    .resume_from_path = {},
                    .max_ckpt_to_keep = {},
                    .device = "cpu"};
  config.kernels = "native";
  config.max_nonfinite_steps = 3;
  config.num_train_rows = 8;
  config.num_val_rows = 4;
  return config;
}

inline PreferenceConfig tiny_preference(const std::string& objective) {
  return {.objective = objective,
          .beta = 0.5,
          .label_smoothing = 0.0,
          .reference_free = false,
          .rpo_alpha = 0.0,
          .reference_path = {},
          .precompute_ref_log_probs = false,
          .center_rewards_coefficient = 0.0,
          .head_seed = 3};
}

}  // namespace banyan::testing
