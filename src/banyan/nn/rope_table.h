// Cosines and sines of rotary position embedding, for every scaling rule of the models
// specification section 1.
//
// freq_i = theta^(-2i / D), i < D/2, then changed by the rule; angle[p, i] = p freq_i. All of it is
// fp32 arithmetic in the order in which transformers does it (the tables that released models were
// trained with are fp32), so the tables agree with it to the last bit or two, at long positions
// too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "banyan/core/device.h"

namespace banyan::nn {

struct RopeOptions {
  std::string type = "default";  // default | linear | dynamic | llama3 | yarn
  double theta = 1e4;
  double factor = 1.0;                          // all but default
  int64_t original_max_positions = 0;           // llama3, yarn: the trained length
  double low_freq_factor = 1.0;                 // llama3
  double high_freq_factor = 4.0;                // llama3
  double beta_fast = 32.0;                      // yarn
  double beta_slow = 1.0;                       // yarn
  bool truncate = true;                         // yarn: round the range of the ramp outwards
  std::optional<double> attention_factor = {};  // yarn: scale of cos and sin
  std::optional<double> mscale = {};            // yarn: both or none
  std::optional<double> mscale_all_dim = {};
};

// [D/2] fp32 on the CPU.
at::Tensor rope_frequencies(const RopeOptions& options, int64_t head_dim);
// What cos and sin are multiplied by (1 for all rules but yarn).
double rope_attention_factor(const RopeOptions& options);

// The tables for positions [0, P): empty at first, made longer on demand.
class RopeTable {
 public:
  // `max_positions`: the longest sequence the model was made for.
  RopeTable(const RopeOptions& options,
            int64_t head_dim,
            int64_t max_positions,
            const ComputeOptions& compute);

  // Makes the tables cover [0, num_positions). Throws [rope] past the trained length of the dynamic
  // rule, whose frequencies would depend on the length of the sequence.
  void reserve(int64_t num_positions);

  const at::Tensor& cos() const { return cos_; }  // [P, D/2] fp32 (fp64 for an fp64 model)
  const at::Tensor& sin() const { return sin_; }

 private:
  RopeOptions options_;
  ComputeOptions compute_;
  int64_t max_positions_;
  at::Tensor frequencies_;
  at::Tensor cos_;
  at::Tensor sin_;
};

}  // namespace banyan::nn
