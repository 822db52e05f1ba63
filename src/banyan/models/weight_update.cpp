#include "banyan/models/weight_update.h"

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

// In the type in which the model computes where that loses nothing: half the memory.
at::Tensor exact_copy(const at::Tensor& master, at::ScalarType compute) {
  at::Tensor narrow = master.to(compute);
  if (narrow.dtype() == master.dtype() || !narrow.to(master.dtype()).equal(master)) {
    return master.clone();
  }
  return narrow;
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

at::Tensor WeightUpdate::read_one(const Param& param) const {
  if (before_each_) before_each_();
  return detail::read_param(directory_, *files_, param);
}

void WeightUpdate::read() {
  std::vector<at::Tensor> values;
  for (const Param& param : model_.params().params()) values.push_back(read_one(param));
  values_ = std::move(values);
  files_.reset();
}

void WeightUpdate::commit() {
  ParamTable& table = model_.params();
  table.restore_masters();
  for (size_t i = 0; i < table.params().size(); ++i) {
    Param& param = table.params()[i];
    if (values_.empty()) {
      param.master.copy_(read_one(param));
      continue;
    }
    at::Tensor old = exact_copy(param.master, model_.options().dtype);
    param.master.copy_(values_[i]);
    values_[i] = std::move(old);
  }
  table.repack();
}

void WeightUpdate::roll_back() {
  ParamTable& table = model_.params();
  BANYAN_ASSERT(values_.size() == table.params().size(), "weight update: nothing to go back to");
  for (size_t i = 0; i < values_.size(); ++i) table.params()[i].master.copy_(values_[i]);
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
