// The rollout engine: prompts in, trajectories out. One KV copy per trunk (the prompt of a group,
// and the longest prefix that prompts of one call share), copy-on-write tails, continuous batching
// with chunked prefill, counter-based sampling. It reads the trainer's packed weights; there is no
// copy.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/models/causal_lm.h"

namespace banyan::rollout {

struct SamplingParams {
  double temperature = 1.0;       // < 1e-5 is greedy
  double top_p = 1.0;             // (0, 1]
  int32_t top_k = -1;             // -1 or 0: off
  int32_t max_tokens = 0;         // new tokens, >= 1
  std::vector<int32_t> stop_ids;  // EOS and others: the token is kept and ends the response
  bool ignore_eos = false;        // stop_ids are not looked at
  uint64_t seed = 0;
  uint64_t step = 0;  // part of the noise key
};

struct Prompt {
  int64_t row = 0;              // part of the noise key; trajectories carry it
  std::vector<int32_t> tokens;  // at least one
  int32_t n = 1;                // responses
};

struct EngineOptions {
  int32_t max_num_seqs = 256;             // running sequences
  int32_t max_num_batched_tokens = 2048;  // tokens of one forward pass
  int64_t kv_bytes = 0;                   // KV pool; 0: a share of the machine's free memory
  double memory_share = 0.5;              // that share
  int64_t max_model_len = 0;              // prompt + response; 0, or more than it has: the model's
  bool share_prefix = true;               // false: every sequence prefills its own prompt
  bool enable_chunked_prefill = true;
};

struct GenerateStats {
  int64_t logical_prompt_tokens = 0;   // prompt tokens of all sequences
  int64_t computed_prompt_tokens = 0;  // prompt tokens that went through the model
  int64_t response_tokens = 0;
  int64_t num_passes = 0;  // forward passes
  int64_t num_preemptions = 0;
  double seconds = 0.0;
};

// Called on the generating thread as each trajectory ends.
using OnFinished = std::function<void(Trajectory&&)>;

class Engine {
 public:
  // `model` is borrowed and must outlive the engine.
  Engine(models::CausalLM& model, const EngineOptions& options);
  ~Engine();

  // Generates every response of every prompt; returns when all have ended. Throws [rollout] before
  // any work for a parameter out of range, an empty prompt, a token outside the vocabulary, a
  // prompt that leaves no room for a token, or a group that can never fit in the pool.
  // `should_stop` is asked between passes; true ends the call, unfinished trajectories come back
  // with FinishReason::kAbort.
  GenerateStats generate(const std::vector<Prompt>& prompts,
                         const SamplingParams& params,
                         const OnFinished& on_finished,
                         const std::function<bool()>& should_stop = nullptr);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace banyan::rollout
