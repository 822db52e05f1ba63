// A generator written in Python (python/banyan/drivers/generator.py drives servers): the calls of
// rollout/generator.h, each under the GIL, with what they hand back to the core called without it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/rollout/generator.h"

namespace banyan::bindings {

namespace py = pybind11;

// The Python object has
//   attach(save, score)              until
//   detach()                         both refuse to be called from then on:
//     save(directory, config_from, dtype)    writes the present weights as an HF directory
//     score(tokens, temperature) -> [float]  the actor's log-probabilities of tokens 1..
//   generate(prompts, params, on_finished, should_stop) -> dict of GenerateStats fields
//   weights_changed(version)
// An exception of its own reaches the caller of banyan._C.train as it is.
class PythonGenerator final : public rollout::Generator {
 public:
  // `model` is borrowed and must outlive this object.
  PythonGenerator(py::object driver, models::CausalLM& model);
  ~PythonGenerator() override;
  PythonGenerator(const PythonGenerator&) = delete;
  PythonGenerator& operator=(const PythonGenerator&) = delete;

  // Throws [generator] if the object returns before every response of every prompt came once.
  rollout::GenerateStats generate(const std::vector<rollout::Prompt>& prompts,
                                  const rollout::SamplingParams& params,
                                  const rollout::OnFinished& on_finished,
                                  const std::function<bool()>& should_stop) override;
  // Prompts carry `original_prompt`.
  bool can_continue() const override { return true; }
  void weights_changed(int64_t version) override;

 private:
  py::object driver_;
  // What save and score work on; null once this object is gone, whoever still holds them.
  std::shared_ptr<models::CausalLM*> actor_;
};

}  // namespace banyan::bindings
