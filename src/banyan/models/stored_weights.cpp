#include "banyan/models/detail/stored_weights.h"

#include <ATen/ops/isfinite.h>

#include <set>

#include "banyan/core/error.h"
#include "banyan/io/json.h"
#include "banyan/models/architecture.h"

namespace banyan::models::detail {
namespace {

constexpr size_t kMaxNamesShown = 200;

// True for a tensor of the files that the model need not have.
bool is_ignored(const std::string& name, const HeadChoice& head) {
  const bool ignores_head = head.tied || head.kind == nn::HeadKind::kValue;
  return name.ends_with(".rotary_emb.inv_freq") || (ignores_head && name == kHead);
}

bool is_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

// "; <label>: a, b, c", or nothing if the list is empty.
std::string listed(const char* label, const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < kMaxNamesShown; ++i) {
    out += (i ? ", " : banyan::detail::concat("; ", label, ": ")) + names[i];
  }
  if (names.size() > kMaxNamesShown) {
    out += banyan::detail::concat(" and ", names.size() - kMaxNamesShown, " more");
  }
  return out;
}

void check_float(const io::HfWeights& weights, const std::string& name, const at::Tensor& tensor) {
  if (is_float(tensor.scalar_type())) return;
  throw FileError(name + ": wanted F32, BF16, F16 or F64, got " + weights.entry(name).stored);
}

}  // namespace

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

void check_tensors(const std::string& directory,
                   const io::HfWeights& weights,
                   const ParamTable& params,
                   const HeadChoice& head) {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> misshapen;
  std::vector<std::string> mistyped;
  std::set<std::string> wanted;
  for (const Param& param : params.params()) {
    wanted.insert(param.name);
    if (head.may_be_missing && is_value_head(param.name) && !weights.contains(kValueWeight)) {
      continue;
    }
    if (!weights.contains(param.name)) {
      missing.push_back(param.name);
      continue;
    }
    const io::TensorEntry& entry = weights.entry(param.name);
    const std::vector<int64_t> shape = param.cut.whole_shape(param.master.sizes());
    if (entry.shape != shape) {
      misshapen.push_back(banyan::detail::concat(param.name,
                                                 " (wanted ",
                                                 at::IntArrayRef(shape),
                                                 ", got ",
                                                 at::IntArrayRef(entry.shape),
                                                 ")"));
    } else if (!is_float(entry.dtype)) {
      mistyped.push_back(param.name + ": wanted F32, BF16, F16 or F64, got " + entry.stored);
    }
  }
  for (const std::string& name : weights.names()) {
    if (wanted.count(name) || is_ignored(name, head)) continue;
    unexpected.push_back(io::printable(name));
  }
  if (missing.empty() && unexpected.empty() && misshapen.empty() && mistyped.empty()) return;
  throw FileError(directory + ": the tensors are not those of config.json" +
                  listed("missing", missing) + listed("unexpected", unexpected) +
                  listed("of another shape", misshapen) + listed("of another type", mistyped));
}

at::Tensor read_float(const io::HfWeights& weights,
                      const std::string& name,
                      const std::vector<int64_t>& shape) {
  at::Tensor tensor = weights.read(name, shape);
  check_float(weights, name, tensor);
  return tensor;
}

at::Tensor read_param(const std::string& directory,
                      const io::HfWeights& weights,
                      const Param& param) {
  const std::vector<int64_t> shape = param.cut.whole_shape(param.master.sizes());
  at::Tensor values;
  if (param.cut.is_whole()) {
    values = read_float(weights, param.name, shape);
  } else {
    values = weights.read_part(
        param.name, shape, param.cut.dim, param.cut.begin, param.master.size(param.cut.dim));
    check_float(weights, param.name, values);
  }
  if (!at::isfinite(values).all().item<bool>()) {
    throw FileError(directory + ": " + param.name + ": wanted finite numbers, got NaN or infinity");
  }
  return values;
}

void check_tied_head(const std::string& directory,
                     const io::HfWeights& weights,
                     const ParamTable& params,
                     const HeadChoice& head) {
  if (!head.tied || head.kind == nn::HeadKind::kValue || !weights.contains(kHead)) return;
  std::vector<int64_t> sizes;
  for (const Param& param : params.params()) {
    if (param.name == kEmbedding) sizes = param.cut.whole_shape(param.master.sizes());
  }
  const at::Tensor stored = read_float(weights, kHead, sizes);
  const at::Tensor embedding = read_float(weights, kEmbedding, sizes);
  if (!stored.to(at::kFloat).equal(embedding.to(at::kFloat))) {
    throw FileError(directory + ": " + kHead +
                    ": differs from model.embed_tokens.weight, though config.json ties them "
                    "(tie_word_embeddings)");
  }
}

}  // namespace banyan::models::detail
