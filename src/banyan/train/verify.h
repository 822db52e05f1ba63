// sharing.verify: the gradients of a mini-batch with sharing against those without (specification
// A14). Both are computed; where they agree, those with sharing are used, so that verifying changes
// no number. Where they do not, those without are used, and the run goes on without sharing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/param.h"
#include "banyan/parallel/collectives.h"

namespace banyan::train {

// "off" | "first" | "every:N".
struct VerifySchedule {
  int64_t every = 0;  // 0: never again after `first`
  bool first = false;

  // Is the update number `update` of this process (from 0) verified?
  bool due(int64_t update) const;
};

// Throws [config] naming actor_rollout_ref.sharing.verify for another word.
VerifySchedule verify_schedule(const std::string& verify);

struct VerifyResult {
  double loss_error = 0.0;      // relative
  double gradient_error = 0.0;  // relative L2 over all parameters together
  double bound = 0.0;           // of both, by the compute type
  bool passed = false;

  std::string line() const;  // for the log
};

// Relative error that a compute type may show: rounding only.
double verify_bound(at::ScalarType dtype);

// `shared` are the gradients with sharing, one per parameter of `params`, whose own gradients are
// those without; after a pass the ones with sharing are put back. `ranks`: those that hold a part
// of the parameters each; null: `params` has them whole.
VerifyResult verify_gradients(const std::vector<at::Tensor>& shared,
                              double shared_loss,
                              double dense_loss,
                              at::ScalarType dtype,
                              ParamTable& params,
                              parallel::Collectives* ranks = nullptr);

std::vector<at::Tensor> clone_gradients(const ParamTable& params);

}  // namespace banyan::train
