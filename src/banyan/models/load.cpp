// Models from files and from random numbers.
//
// The tensors of a file and the parameters of the model must be the same set: what is missing or
// unexpected is listed, all of it, in one error. Two names are optional: the RoPE buffers of old
// files, which are recomputed, and lm_head.weight of a tied model, which must then equal the
// embedding. A model with a value head ignores lm_head.weight, and its own head may be missing.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <set>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/safetensors.h"
#include "banyan/models/architecture.h"
#include "banyan/models/decoder_lm.h"

namespace banyan::models {
namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr const char* kValueWeight = "score.weight";
constexpr const char* kValueBias = "score.bias";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr size_t kMaxNamesShown = 200;

nn::DecoderOptions read_options(const HfConfig& config, const std::string& where) {
  ReadConfig read = nullptr;
  try {
    read = architectures().get(config.model_type());
  } catch (const std::invalid_argument& error) {
    throw FileError(where + ": model_type: " + error.what());
  }
  return read(config);
}

bool is_value_head(const std::string& name) { return name == kValueWeight || name == kValueBias; }

// True for a tensor of the files that the model need not have.
bool is_ignored(const std::string& name, const nn::DecoderOptions& shape) {
  const bool ignores_head = shape.tied || shape.head == HeadKind::kValue;
  return name.ends_with(".rotary_emb.inv_freq") || (ignores_head && name == kHead);
}

// The structure under `options`: a value head has a bias if the files hold one; a new head has it
// on demand.
nn::DecoderOptions with_head(nn::DecoderOptions shape,
                             const LoadOptions& options,
                             bool has_weight,
                             bool has_bias) {
  shape.head = options.head;
  shape.value_bias = has_weight ? has_bias : options.head_bias;
  return shape;
}

// "; <label>: a, b, c", or nothing if the list is empty.
std::string listed(const char* label, const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < kMaxNamesShown; ++i) {
    out += (i ? ", " : detail::concat("; ", label, ": ")) + names[i];
  }
  if (names.size() > kMaxNamesShown) {
    out += detail::concat(" and ", names.size() - kMaxNamesShown, " more");
  }
  return out;
}

// Compares names and shapes with those of a model that is built without memory, so that a config
// that lies about its sizes is refused before anything is allocated.
void check_tensors(const std::string& directory,
                   const io::HfWeights& weights,
                   const std::string& architecture,
                   const nn::DecoderOptions& shape) {
  DecoderLM outline(architecture,
                    shape,
                    {{.dtype = at::kFloat, .device = at::kMeta, .kernels = Kernels::kAten}, false});
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> misshapen;
  std::set<std::string> wanted;
  for (const Param& param : outline.params().params()) {
    wanted.insert(param.name);
    if (is_value_head(param.name) && !weights.contains(kValueWeight)) continue;
    if (!weights.contains(param.name)) {
      missing.push_back(param.name);
    } else if (const auto& sizes = weights.entry(param.name).shape; sizes != param.master.sizes()) {
      misshapen.push_back(detail::concat(
          param.name, " (wanted ", param.master.sizes(), ", got ", at::IntArrayRef(sizes), ")"));
    }
  }
  for (const std::string& name : weights.names()) {
    if (wanted.count(name) || is_ignored(name, shape)) continue;
    unexpected.push_back(io::printable(name));
  }
  if (missing.empty() && unexpected.empty() && misshapen.empty()) return;
  throw FileError(directory + ": the tensors are not those of config.json" +
                  listed("missing", missing) + listed("unexpected", unexpected) +
                  listed("of another shape", misshapen));
}

// A stored weight as a floating-point tensor of the given shape.
at::Tensor read_float(const io::HfWeights& weights,
                      const std::string& name,
                      const std::vector<int64_t>& shape) {
  at::Tensor tensor = weights.read(name, shape);
  const at::ScalarType type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf && type != at::kDouble) {
    throw FileError(name + ": wanted F32, BF16, F16 or F64, got " + weights.entry(name).stored);
  }
  return tensor;
}

void check_tied_head(const std::string& directory,
                     const io::HfWeights& weights,
                     const nn::DecoderOptions& shape) {
  if (!shape.tied || shape.head == HeadKind::kValue || !weights.contains(kHead)) return;
  const std::vector<int64_t> sizes = {shape.vocab, shape.hidden};
  const at::Tensor head = read_float(weights, kHead, sizes);
  const at::Tensor embedding = read_float(weights, kEmbedding, sizes);
  if (!head.to(at::kFloat).equal(embedding.to(at::kFloat))) {
    throw FileError(directory + ": " + kHead +
                    ": differs from model.embed_tokens.weight, though config.json ties them "
                    "(tie_word_embeddings)");
  }
}

at::Tensor normal(at::IntArrayRef sizes, double std, at::Generator& generator) {
  return at::empty(sizes, at::kFloat).normal_(0.0, std, generator);
}

void init_value_head(double std, uint64_t seed, CausalLM& model) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  Param& weight = model.params().at(kValueWeight);
  weight.master.copy_(normal(weight.master.sizes(), std, generator));
}

}  // namespace

std::unique_ptr<CausalLM> load_model(const std::string& directory, const LoadOptions& options) {
  const std::string where = directory + "/config.json";
  const HfConfig config(io::read_text(where), where);
  const io::HfWeights weights(directory);
  const bool has_value_head = weights.contains(kValueWeight);
  const nn::DecoderOptions shape =
      with_head(read_options(config, where), options, has_value_head, weights.contains(kValueBias));
  check_tensors(directory, weights, config.model_type(), shape);
  auto model = std::make_unique<DecoderLM>(config.model_type(), shape, options);
  check_tied_head(directory, weights, shape);
  for (Param& param : model->params().params()) {
    if (is_value_head(param.name) && !has_value_head) continue;
    param.master.copy_(read_float(weights, param.name, param.master.sizes().vec()));
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
  const nn::DecoderOptions shape =
      with_head(read_options(config, where), options, /*has_weight=*/false, /*has_bias=*/false);
  auto model = std::make_unique<DecoderLM>(config.model_type(), shape, options);
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (Param& param : model->params().params()) {
    at::Tensor values = normal(param.master.sizes(), config.initializer_range(), generator);
    param.master.copy_(param.name.ends_with("norm.weight") ? values.add_(1.0) : values);
  }
  model->params().repack();
  return model;
}

}  // namespace banyan::models
