// New values for the parameters of a model that is in use, from an HF directory, in two phases. The
// constructor opens the files anew (nothing is remembered by name) and verifies configuration,
// names, shapes and types without touching the model; read() brings the values to memory and
// refuses numbers that are not finite; commit() switches. What throws before commit() leaves the
// model wholly old, and after it roll_back() makes it so again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "banyan/io/safetensors.h"
#include "banyan/models/causal_lm.h"

namespace banyan::models {

class WeightUpdate {
 public:
  // `model` is borrowed. Throws FileError that lists everything that does not fit.
  WeightUpdate(CausalLM& model, const std::string& directory);

  // Bytes of the tensors as they are stored: what read() takes.
  int64_t num_bytes() const;
  // Reads all tensors. Throws FileError. `before_each` is called before each tensor of read() and
  // of a commit() that reads; what it throws ends the call.
  void read();
  void before_each(std::function<void()> call) { before_each_ = std::move(call); }
  // Copies the values into the masters and rebuilds every compute form. After read() nothing of the
  // files is needed, and the old values are kept for roll_back(). Without it (when memory is short)
  // tensors are read one by one as they are copied, and a failure leaves a mixture: returns only if
  // all went well, so that the caller knows not to use the model after an exception. Masters whose
  // memory was given back get it again.
  void commit();
  // After read() and commit(): the model is as it was, bit for bit.
  void roll_back();

 private:
  at::Tensor read_one(const Param& param) const;

  CausalLM& model_;
  std::string directory_;
  std::unique_ptr<io::HfWeights> files_;
  std::function<void()> before_each_;
  std::vector<at::Tensor> values_;  // per parameter: the new after read(), the old after commit()
};

// SHA-256 of every master's bytes, in the type in which the model computes: equal for two models
// that generate alike. By HF name.
std::map<std::string, std::string> weight_checksums(CausalLM& model);

}  // namespace banyan::models
