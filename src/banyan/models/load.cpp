// Models from files and from random numbers.
//
// The tensors of a file and the parameters of the model must be the same set: what is missing or
// unexpected is listed, all of it, in one error. Two names are optional: the RoPE buffers of old
// files, which are recomputed, and lm_head.weight of a tied model, which must then equal the
// embedding. A model with a value head ignores lm_head.weight, and its own head may be missing.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/safetensors.h"
#include "banyan/models/decoder_lm.h"
#include "banyan/models/detail/stored_weights.h"

namespace banyan::models {
namespace {

constexpr const char* kMegatron = "actor_rollout_ref.actor.megatron.";

// Experts dealt out over `num_ranks`, with each in `num_parts`.
void check_experts(const nn::DecoderOptions& shape, int64_t num_ranks, int64_t num_parts) {
  const bool has_experts = shape.num_moe_layers() > 0;
  BANYAN_CHECK(num_ranks == 1 || has_experts,
               "[config] ",
               kMegatron,
               "expert_model_parallel_size: wanted 1 for a model without experts, got ",
               num_ranks);
  BANYAN_CHECK(num_ranks == 1 || shape.moe.num_experts % num_ranks == 0,
               "[config] ",
               kMegatron,
               "expert_model_parallel_size: wanted a divisor of the model's ",
               shape.moe.num_experts,
               " experts, got ",
               num_ranks);
  BANYAN_CHECK(!has_experts || shape.moe.intermediate >= num_parts,
               "[config] ",
               kMegatron,
               "expert_tensor_parallel_size: wanted at most moe_intermediate_size (",
               shape.moe.intermediate,
               "), got ",
               num_parts);
}

// The structure under `options`: a value head has a bias if the files hold one; a new head has it
// on demand.
nn::DecoderOptions with_head(nn::DecoderOptions shape,
                             const LoadOptions& options,
                             bool has_weight,
                             bool has_bias) {
  shape.head = options.head;
  shape.value_bias = has_weight ? has_bias : options.head_bias;
  shape.moe.router_in_double = options.router_in_double;
  const bool has_experts = shape.num_moe_layers() > 0;
  const auto size = [](parallel::Collectives* ranks) { return ranks ? ranks->size() : 1; };
  check_experts(shape, size(options.experts), size(options.expert_tensor));
  if (!parallel::is_alone(options.experts)) shape.moe.ranks = options.experts;
  if (options.expert_tensor != nullptr && has_experts) {
    shape.moe.ranks = options.experts;
    shape.moe.parts = options.expert_tensor;
  }
  return shape;
}

// Compares names and shapes with those of a model that is built without memory, so that a config
// that lies about its sizes is refused before anything is allocated.
void check_directory(const std::string& directory,
                     const io::HfWeights& weights,
                     const std::string& architecture,
                     nn::DecoderOptions shape,
                     const LoadOptions& options) {
  LoadOptions without = options;
  without.compute = {.dtype = at::kFloat, .device = at::kMeta, .kernels = Kernels::kAten};
  without.with_backward = false;
  without.with_values = true;
  without.before_values = nullptr;
  without.pipeline = nullptr;  // the files hold all layers, and all experts
  shape.moe.ranks = shape.moe.parts = nullptr;
  DecoderLM outline(architecture, shape, without);
  const detail::HeadChoice head = {shape.tied, shape.head, /*may_be_missing=*/true};
  detail::check_tensors(directory, weights, outline.params(), head);
  detail::check_tied_head(directory, weights, outline.params(), head);
}

at::Tensor normal(at::IntArrayRef sizes, double std, at::Generator& generator) {
  return at::empty(sizes, at::kFloat).normal_(0.0, std, generator);
}

void init_value_head(double std, uint64_t seed, CausalLM& model) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  const std::vector<Param>& params = model.params().params();
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].name != detail::kValueWeight) continue;
    model.params().put(i, normal(params[i].master.sizes(), std, generator));
  }
}

}  // namespace

void check_cut(const std::string& directory, const CutSizes& sizes) {
  const std::string where = directory + "/config.json";
  const nn::DecoderOptions shape = detail::read_options({io::read_text(where), where}, where);
  check_experts(shape, sizes.experts, sizes.expert_tensor.value_or(1));
  if (sizes.tensor == 1) return;
  parallel::check_cut(sizes_of(shape, /*cuts_experts=*/!sizes.expert_tensor), sizes.tensor);
}

std::unique_ptr<CausalLM> load_model(const std::string& directory, const LoadOptions& options) {
  const std::string where = directory + "/config.json";
  const HfConfig config(io::read_text(where), where);
  const io::HfWeights weights(directory);
  const bool has_value_head = weights.contains(detail::kValueWeight);
  const nn::DecoderOptions shape = with_head(detail::read_options(config, where),
                                             options,
                                             has_value_head,
                                             weights.contains(detail::kValueBias));
  check_directory(directory, weights, config.model_type(), shape, options);
  auto model = std::make_unique<DecoderLM>(config.model_type(), shape, options);
  if (!options.with_values) return model;
  if (options.before_values) options.before_values(*model);
  for (size_t i = 0; i < model->params().params().size(); ++i) {
    const Param& param = model->params().params()[i];
    if (!has_value_head && detail::is_value_head(param.name)) continue;
    model->params().put(i, detail::read_param(directory, weights, param));
  }
  if (shape.head == HeadKind::kValue && !has_value_head) {
    init_value_head(config.initializer_range(), options.head_seed, *model);
    if (options.notes) {
      options.notes->push_back(directory + ": no value head there; it starts from random weights");
    }
  }
  model->params().repack();
  return model;
}

// Norm weights are 1 + noise and biases noise, so that no parameter can be left out unnoticed.
std::unique_ptr<CausalLM> random_model(const std::string& config_json,
                                       uint64_t seed,
                                       const LoadOptions& options) {
  const std::string where = "config.json";
  const HfConfig config(config_json, where);
  const nn::DecoderOptions shape = with_head(
      detail::read_options(config, where), options, /*has_weight=*/false, /*has_bias=*/false);
  auto model = std::make_unique<DecoderLM>(config.model_type(), shape, options);
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const TensorShape& tensor : model->tensors()) {  // others may hold them
    at::Tensor values = normal(tensor.shape, config.initializer_range(), generator);
    if (!model->params().contains(tensor.name)) continue;
    Param& param = model->params().at(tensor.name);
    if (param.name.ends_with("norm.weight")) values.add_(1.0);
    const int64_t size = param.cut.is_whole() ? 0 : param.master.size(param.cut.dim);
    param.master.copy_(param.cut.part_of(values, size));
  }
  model->params().repack();
  return model;
}

}  // namespace banyan::models
