// Models from files and from random numbers.
//
// The tensors of a file and the parameters of the model must be the same set: what is missing or
// unexpected is listed, all of it, in one error. Two names are optional: the RoPE buffers of old
// files, which are recomputed, and lm_head.weight of a tied model, which must then equal the
// embedding.
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

bool is_ignored(const std::string& name) { return name.ends_with(".rotary_emb.inv_freq"); }

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
    if (!weights.contains(param.name)) {
      missing.push_back(param.name);
    } else if (const auto& sizes = weights.entry(param.name).shape; sizes != param.master.sizes()) {
      misshapen.push_back(detail::concat(
          param.name, " (wanted ", param.master.sizes(), ", got ", at::IntArrayRef(sizes), ")"));
    }
  }
  for (const std::string& name : weights.names()) {
    if (wanted.count(name) || is_ignored(name) || (shape.tied && name == kHead)) continue;
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
                     const ModelShape& shape) {
  if (!shape.tied || !weights.contains(kHead)) return;
  const std::vector<int64_t> sizes = {shape.vocab, shape.hidden};
  const at::Tensor head = read_float(weights, kHead, sizes);
  const at::Tensor embedding = read_float(weights, kEmbedding, sizes);
  if (!head.to(at::kFloat).equal(embedding.to(at::kFloat))) {
    throw FileError(directory + ": " + kHead +
                    ": differs from model.embed_tokens.weight, though config.json ties them "
                    "(tie_word_embeddings)");
  }
}

}  // namespace

std::unique_ptr<CausalLM> load_model(const std::string& directory, const LoadOptions& options) {
  const std::string where = directory + "/config.json";
  const HfConfig config(io::read_text(where), where);
  const nn::DecoderOptions shape = read_options(config, where);
  const io::HfWeights weights(directory);
  check_tensors(directory, weights, config.model_type(), shape);
  auto model = std::make_unique<DecoderLM>(config.model_type(), shape, options);
  check_tied_head(directory, weights, model->shape());
  for (Param& param : model->params().params()) {
    param.master.copy_(read_float(weights, param.name, param.master.sizes().vec()));
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
  auto model =
      std::make_unique<DecoderLM>(config.model_type(), read_options(config, where), options);
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (Param& param : model->params().params()) {
    const at::Tensor values = at::empty(param.master.sizes(), at::kFloat);
    values.normal_(0.0, config.initializer_range(), generator);
    param.master.copy_(param.name.ends_with("norm.weight") ? values.add_(1.0) : values);
  }
  model->params().repack();
  return model;
}

}  // namespace banyan::models
