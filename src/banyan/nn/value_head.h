// The value head of a critic or reward model: one output per hidden row, under HF's names
// score.weight [1, E] and score.bias [1].
#pragma once

#include <ATen/core/Tensor.h>

#include "banyan/core/device.h"
#include "banyan/core/param.h"
#include "banyan/ops/value_head.h"

namespace banyan::nn {

class ValueHead {
 public:
  // Allocates the masters (zeros) and registers them. The table must outlive the head's use.
  ValueHead(ParamTable& table, int64_t hidden, bool with_bias, const ComputeOptions& options);
  ValueHead(const ValueHead&) = delete;
  ValueHead& operator=(const ValueHead&) = delete;

  const ops::ValueHeadWeight& compute() const { return compute_; }
  // Gradients of the two; undefined until ParamTable::ensure_grads (the bias also without one).
  at::Tensor& grad_weight();
  at::Tensor grad_bias() const;

 private:
  ParamTable& table_;
  int64_t weight_ = 0;  // index in the table
  int64_t bias_ = -1;
  ops::ValueHeadWeight compute_;
};

}  // namespace banyan::nn
