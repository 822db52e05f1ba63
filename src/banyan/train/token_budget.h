// Tokens of one block where no key sets them: as many as the free memory holds.
//
//   tokens = largest power of two <= 0.8 free / bytes per token
//
// Bytes per token are the closed formula of nn/activation_bytes.h and the head's rows, all tokens
// scored. A power of two, so that small changes of the free memory do not move the cuts: a budget
// changes no result beyond the rounding of sums, but a run should give the same bits twice. So the
// choice is also kept in the folder of the run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "banyan/models/causal_lm.h"

namespace banyan::train {

// What a run takes beside the activations, once it goes.
struct MemoryLeft {
  int64_t free_bytes = 0;  // could be taken now; 0: unknown
  // Gradients and moments that are not there yet, a KV pool and a second model that stay.
  int64_t reserved_bytes = 0;
};

// Of the machine or its control group, for a CPU; of the accelerator else.
int64_t free_memory_bytes(at::Device device);

// Bytes that gradients and, if `with_moments`, the optimizer's moments of a model will take.
int64_t coming_bytes(models::CausalLM& model, bool with_moments);

// Bytes of one token of a block, at most.
int64_t bytes_per_token(const models::CausalLM& model);

// At least 256; 16,384 (verl's) where the free memory or the model's need is unknown.
int64_t token_budget(int64_t bytes_per_token, const MemoryLeft& left);

// The budget of `role` ("actor") by `left`, or the one that token_budget.json in `folder` holds for
// the same bytes per token, if that still fits the free memory. Writes the file and says what was
// chosen and why. Throws FileError.
int64_t token_budget_once(const std::string& folder,
                          const std::string& role,
                          const std::string& key,
                          int64_t bytes_per_token,
                          const MemoryLeft& left,
                          const std::function<void(const std::string&)>& say);

}  // namespace banyan::train
