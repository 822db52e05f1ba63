// Model, score: a model from an HF directory and log-probabilities through one trie.
#include "banyan/core/error.h"
#include "banyan/models/causal_lm.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/walk.h"
#include "banyan/trie/plan.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

std::vector<Sample> samples_from(const std::vector<std::vector<int32_t>>& ids) {
  std::vector<Sample> samples;
  for (size_t i = 0; i < ids.size(); ++i) {
    Sample sample;
    sample.uid = static_cast<int64_t>(i);
    sample.tokens = ids[i];
    samples.push_back(std::move(sample));
  }
  return samples;
}

trie::PlanOptions plan_options(bool share, int64_t max_tokens_per_block) {
  trie::PlanOptions options;
  options.build.share = share;
  options.max_tokens_per_block = max_tokens_per_block;
  options.for_backward = false;
  return options;
}

py::dict score(models::CausalLM& model,
               const std::vector<std::vector<int32_t>>& ids,
               bool share,
               double temperature,
               int64_t max_tokens_per_block,
               bool with_sum_squares) {
  trie::Plan plan;
  train::SampleScores scores;
  {
    py::gil_scoped_release release;
    plan = trie::plan(samples_from(ids), plan_options(share, max_tokens_per_block));
    scores = train::score_samples(
        model,
        plan,
        {.temperature = temperature, .with_entropy = true, .with_sum_squares = with_sum_squares});
  }
  py::dict out;
  out["logprobs"] = scores.value;
  out["entropy"] = scores.entropy;
  out["sum_squares"] = scores.sum_squares;
  out["num_blocks"] = plan.blocks.size();
  out["logical_tokens"] = plan.num_logical;
  out["unique_tokens"] = plan.num_unique;
  out["computed_tokens"] = plan.num_computed;
  return out;
}

// Logits of every token of each sample, [tokens, V] fp32 or fp64: parity tests and small inputs
// only.
std::vector<at::Tensor> logits(models::CausalLM& model,
                               const std::vector<std::vector<int32_t>>& ids,
                               bool share) {
  py::gil_scoped_release release;
  const std::vector<Sample> samples = samples_from(ids);
  return train::sample_logits(model, samples, share);
}

using Named = std::map<std::string, at::Tensor>;

Named whole_of(models::CausalLM& model, parallel::Groups& groups, bool gradients) {
  py::gil_scoped_release release;
  std::vector<at::Tensor> own;
  for (const Param& param : model.params().params()) {
    own.push_back(gradients ? param.grad : param.master);
  }
  Named out;
  parallel::WeightView(model.params(), groups)
      .each_of(own, [&](const std::string& name, const at::Tensor& whole) {
        out[name] = whole.clone();
      });
  return out;
}

Named whole_params(models::CausalLM& model, const std::shared_ptr<parallel::Groups>& groups) {
  return whole_of(model, *groups, /*gradients=*/false);
}

Named whole_grads(models::CausalLM& model, const std::shared_ptr<parallel::Groups>& groups) {
  return whole_of(model, *groups, /*gradients=*/true);
}

models::HeadKind head_from(const std::string& word) {
  BANYAN_CHECK(word == "vocabulary" || word == "value",
               "[model] head: wanted vocabulary or value, got '",
               word,
               "'");
  return word == "value" ? models::HeadKind::kValue : models::HeadKind::kVocabulary;
}

py::dict shape_dict(const models::CausalLM& model) {
  const models::ModelShape& shape = model.shape();
  py::dict out;
  out["architecture"] = shape.architecture;
  out["vocab"] = shape.vocab;
  out["hidden"] = shape.hidden;
  out["layers"] = shape.layers;
  out["heads"] = shape.heads;
  out["kv_heads"] = shape.kv_heads;
  out["head_dim"] = shape.head_dim;
  out["intermediate"] = shape.intermediate;
  out["max_positions"] = shape.max_positions;
  out["tied"] = shape.tied;
  return out;
}

}  // namespace

void bind_model(py::module_& module) {
  py::class_<models::CausalLM>(module, "Model", "A causal language model in an HF directory.")
      .def_static(
          "load",
          [](const std::string& directory,
             const std::string& dtype,
             const std::string& device,
             const std::string& kernels,
             bool with_backward,
             const std::string& head,
             const std::shared_ptr<parallel::Groups>& groups,
             bool sequence_parallel,
             int64_t chunks) {
            models::LoadOptions options{compute_options(dtype, device, kernels), with_backward};
            options.head = head_from(head);
            if (groups) {
              train::set_cut(sequence_parallel, *groups, options);
              train::set_stages({.pipeline_model_parallel_size = groups->pipeline.size(),
                                 .virtual_pipeline_model_parallel_size = chunks},
                                *groups,
                                options);
            }
            py::gil_scoped_release release;
            return models::load_model(directory, options);
          },
          py::arg("directory"),
          py::arg("dtype") = "bf16",
          py::arg("device") = "cpu",
          py::arg("kernels") = "native",
          py::arg("with_backward") = false,
          py::arg("head") = "vocabulary",
          py::arg("groups") = nullptr,
          py::arg("sequence_parallel") = false,
          py::arg("chunks") = 1,
          py::keep_alive<0, 7>(),
          "Loads config.json and safetensors of `directory`; head='value' reads one value per "
          "token "
          "in place of next-token logits; over `groups` each rank holds a part of each layer, or "
          "`chunks` of the layers. "
          "Raises OSError naming file, tensor and reason.")
      .def_property_readonly("shape", &shape_dict, "Sizes as a dict.")
      .def(
          "save",
          [](models::CausalLM& model,
             const std::string& directory,
             const std::string& config_from,
             const std::string& dtype) {
            const ComputeOptions options = compute_options(dtype, "cpu", "native");
            py::gil_scoped_release release;
            models::save_model(model, config_from, directory, options.dtype);
          },
          py::arg("directory"),
          py::arg("config_from"),
          py::arg("dtype") = "bf16",
          "Writes an HF directory that transformers loads.")
      .def(
          "params",
          [](models::CausalLM& model) {
            std::map<std::string, at::Tensor> out;
            for (const Param& param : model.params().params()) out[param.name] = param.master;
            return out;
          },
          "Name -> fp32 master (shared storage).")
      .def(
          "grads",
          [](models::CausalLM& model) {
            std::map<std::string, at::Tensor> out;
            for (const Param& param : model.params().params()) {
              if (param.grad.defined()) out[param.name] = param.grad;
            }
            return out;
          },
          "Name -> gradient (shared storage) of the last accumulate_gradients.")
      .def(
          "repack",
          [](models::CausalLM& model) {
            py::gil_scoped_release release;
            model.params().repack();
          },
          "Takes over weights that were changed in place (params).");
  module.def(
      "whole_params",
      &whole_params,
      py::arg("model"),
      py::arg("groups"),
      "Name -> whole fp32 master of a model that is cut over `groups`; all ranks call this.");
  module.def("whole_grads",
             &whole_grads,
             py::arg("model"),
             py::arg("groups"),
             "Name -> whole gradient, likewise.");
  module.def(
      "score",
      &score,
      py::arg("model"),
      py::arg("samples"),
      py::arg("share") = true,
      py::arg("temperature") = 1.0,
      py::arg("max_tokens_per_block") = 0,
      py::arg("with_sum_squares") = false,
      "Log-probabilities and entropies of tokens 1..n-1 of each sample: 1-D tensors per sample.");
  module.def("logits",
             &logits,
             py::arg("model"),
             py::arg("samples"),
             py::arg("share") = true,
             "Logits of every token of each sample, for small inputs.");
}

}  // namespace banyan::bindings
