// Engine: generation. Everything runs with the GIL released; it is taken once per finished
// trajectory.
#include "banyan/rollout/engine.h"

#include <pybind11/functional.h>

#include "convert.h"

namespace banyan::bindings {
namespace {

rollout::EngineOptions engine_options(const py::dict& from) {
  rollout::EngineOptions options;
  options.max_num_seqs = get_or(from, "max_num_seqs", options.max_num_seqs);
  options.max_num_batched_tokens =
      get_or(from, "max_num_batched_tokens", options.max_num_batched_tokens);
  options.kv_bytes = get_or(from, "kv_bytes", options.kv_bytes);
  options.memory_share = get_or(from, "memory_share", options.memory_share);
  options.max_model_len = get_or(from, "max_model_len", options.max_model_len);
  options.share_prefix = get_or(from, "share_prefix", options.share_prefix);
  options.enable_chunked_prefill =
      get_or(from, "enable_chunked_prefill", options.enable_chunked_prefill);
  return options;
}

rollout::SamplingParams sampling_params(const py::dict& from) {
  rollout::SamplingParams params;
  params.temperature = get_or(from, "temperature", params.temperature);
  params.top_p = get_or(from, "top_p", params.top_p);
  params.top_k = get_or(from, "top_k", params.top_k);
  params.max_tokens = get_or(from, "max_tokens", params.max_tokens);
  params.eos_ids = get_or(from, "eos_ids", params.eos_ids);
  params.ignore_eos = get_or(from, "ignore_eos", params.ignore_eos);
  params.seed = get_or(from, "seed", params.seed);
  params.step = get_or(from, "step", params.step);
  return params;
}

py::dict generate(rollout::Engine& engine,
                  const std::vector<py::dict>& rows,
                  const py::dict& params,
                  const std::function<void(py::dict)>& on_finished) {
  std::vector<rollout::Prompt> prompts;
  for (const py::dict& row : rows) {
    prompts.push_back({row["row"].cast<int64_t>(),
                       row["tokens"].cast<std::vector<int32_t>>(),
                       get_or<int32_t>(row, "n", 1)});
  }
  const rollout::SamplingParams sampling = sampling_params(params);
  rollout::GenerateStats stats;
  {
    py::gil_scoped_release release;
    stats = engine.generate(
        prompts,
        sampling,
        [&](Trajectory&& trajectory) {
          py::gil_scoped_acquire acquire;
          on_finished(to_dict(trajectory));
        },
        [] {
          py::gil_scoped_acquire acquire;
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
          return false;
        });
  }
  py::dict out;
  out["logical_prompt_tokens"] = stats.logical_prompt_tokens;
  out["computed_prompt_tokens"] = stats.computed_prompt_tokens;
  out["response_tokens"] = stats.response_tokens;
  out["num_passes"] = stats.num_passes;
  out["num_preemptions"] = stats.num_preemptions;
  out["seconds"] = stats.seconds;
  return out;
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<rollout::Engine>(
      module, "Engine", "The rollout engine over a model, which it keeps alive.")
      .def(py::init([](models::CausalLM& model, const py::dict& options) {
             return std::make_unique<rollout::Engine>(model, engine_options(options));
           }),
           py::arg("model"),
           py::arg("options") = py::dict(),
           py::keep_alive<1, 2>())
      .def("generate",
           &generate,
           py::arg("prompts"),
           py::arg("params"),
           py::arg("on_finished"),
           "Generates every response of every prompt; `on_finished` gets each trajectory as it "
           "ends.");
}

}  // namespace banyan::bindings
