#include "banyan/models/weight_update.h"

#include <ATen/ops/isfinite.h>
#include <sys/stat.h>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/sha256.h"
#include "banyan/models/detail/stored_weights.h"

namespace banyan::models {
namespace {

bool exists(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0;
}

// A directory of weights alone is welcome; a config.json beside them must describe this model.
void check_config(const std::string& directory, const ModelShape& shape) {
  const std::string where = directory + "/config.json";
  if (!exists(where)) return;
  const HfConfig config(io::read_text(where), where);
  const nn::DecoderOptions stored = detail::read_options(config, where);
  const auto check = [&](const char* what, const auto& wanted, const auto& got) {
    if (wanted == got) return;
    throw FileError(banyan::detail::concat(
        where, ": ", what, ": wanted ", wanted, " as in the model in use, got ", got));
  };
  check("model_type", shape.architecture, config.model_type());
  check("vocab_size", shape.vocab, stored.vocab);
  check("hidden_size", shape.hidden, stored.hidden);
  check("num_hidden_layers", shape.layers, stored.layers);
  check("num_attention_heads", shape.heads, stored.heads);
  check("num_key_value_heads", shape.kv_heads, stored.kv_heads);
  check("head_dim", shape.head_dim, stored.head_dim);
  check("tie_word_embeddings", shape.tied, stored.tied);
}

}  // namespace

WeightUpdate::WeightUpdate(CausalLM& model, const std::string& directory)
    : model_(model), directory_(directory) {
  check_config(directory, model.shape());
  files_ = std::make_unique<io::HfWeights>(directory);
  const detail::HeadChoice head = {model.shape().tied, model.head_kind()};
  detail::check_tensors(directory, *files_, model.params(), head);
  detail::check_tied_head(directory, *files_, model.params(), head);
}

int64_t WeightUpdate::num_bytes() const {
  int64_t total = 0;
  for (const Param& param : model_.params().params()) {
    const io::TensorEntry& entry = files_->entry(param.name);
    total += static_cast<int64_t>(entry.end - entry.begin);
  }
  return total;
}

at::Tensor WeightUpdate::read_finite(const Param& param) const {
  at::Tensor values = detail::read_float(*files_, param.name, param.master.sizes().vec());
  if (!at::isfinite(values).all().item<bool>()) {
    throw FileError(directory_ + ": " + param.name +
                    ": wanted finite numbers, got NaN or infinity");
  }
  return values;
}

void WeightUpdate::read() {
  std::vector<at::Tensor> values;
  for (const Param& param : model_.params().params()) values.push_back(read_finite(param));
  values_ = std::move(values);
  files_.reset();
}

void WeightUpdate::commit() {
  ParamTable& table = model_.params();
  table.restore_masters();
  for (size_t i = 0; i < table.params().size(); ++i) {
    Param& param = table.params()[i];
    param.master.copy_(values_.empty() ? read_finite(param) : values_[i]);
    if (!values_.empty()) values_[i] = at::Tensor();
  }
  table.repack();
}

std::map<std::string, std::string> weight_checksums(CausalLM& model) {
  std::map<std::string, std::string> out;
  for (const Param& param : model.params().params()) {
    const at::Tensor bytes = param.master.to(model.options().dtype).cpu().contiguous();
    io::Sha256 hash;
    hash.update(bytes.const_data_ptr(), bytes.nbytes());
    out[param.name] = hash.hex();
  }
  return out;
}

}  // namespace banyan::models
