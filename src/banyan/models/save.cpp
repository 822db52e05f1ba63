// Models to HF directories: config.json of the source with the dtype that is written, shards,
// tokenizer files.
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <filesystem>

#include "banyan/core/error.h"
#include "banyan/io/dtype.h"
#include "banyan/io/files.h"
#include "banyan/io/json.h"
#include "banyan/io/posix_file.h"
#include "banyan/io/safetensors.h"
#include "banyan/models/causal_lm.h"
#include "banyan/models/detail/stored_weights.h"

namespace banyan::models {
namespace {

// Copied as they are, where the source has them.
constexpr std::array<const char*, 9> kCompanions = {"tokenizer.json",
                                                    "tokenizer_config.json",
                                                    "special_tokens_map.json",
                                                    "vocab.json",
                                                    "merges.txt",
                                                    "generation_config.json",
                                                    "chat_template.jinja",
                                                    "added_tokens.json",
                                                    "tokenizer.model"};

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    default:
      BANYAN_CHECK(false, "[save_model] dtype: wanted bf16, fp16, fp32 or fp64, got ", dtype);
  }
  return "";
}

// "LlamaForCausalLM" -> "LlamaForTokenClassification", with one label and no dropout.
void set_value_head(io::Json& config, bool has_bias) {
  const auto names = config.find("architectures");
  if (names != config.end() && names->is_array() && !names->empty() && (*names)[0].is_string()) {
    const std::string name = (*names)[0];
    *names = {name.substr(0, name.find("For")) +
              (has_bias ? "ForTokenClassification" : "ForSequenceClassification")};
  }
  config["id2label"] = {{"0", "LABEL_0"}};
  config["label2id"] = {{"LABEL_0", 0}};
  config["classifier_dropout"] = 0.0;
}

// Both spellings of the key, for older and newer transformers.
std::string config_text(CausalLM& model,
                        const std::string& source,
                        at::ScalarType dtype,
                        bool has_value_bias) {
  const std::string where = source + "/config.json";
  io::Json config = io::parse_json(io::read_text(where), where);
  config["dtype"] = config["torch_dtype"] = dtype_name(dtype);
  if (model.head_kind() == HeadKind::kValue) {
    set_value_head(config, has_value_bias);
  }
  return config.dump(2) + "\n";
}

std::map<std::string, at::Tensor> masters_of(CausalLM& model) {
  std::map<std::string, at::Tensor> masters;
  BANYAN_ASSERT(model.stage() == nullptr, "save_model: other stages hold layers");
  for (const Param& param : model.params().params()) {
    BANYAN_ASSERT(param.cut.is_whole(), "save_model: ", param.name, " is a part of its tensor");
    masters[param.name] = param.master;
  }
  return masters;
}

void write_all(CausalLM& model,
               const std::string& source,
               const std::string& directory,
               at::ScalarType dtype,
               const std::map<std::string, at::Tensor>& weights) {
  io::write_text_atomic(directory + "/config.json",
                        config_text(model, source, dtype, weights.count(detail::kValueBias) > 0));
  for (const char* name : kCompanions) {
    struct stat status;
    const std::string from = source + "/" + name;
    if (::stat(from.c_str(), &status) == 0) {
      io::write_text_atomic(directory + "/" + name, io::read_text(from));
    }
  }
  std::vector<io::NamedTensor> tensors;
  for (const auto& [name, tensor] : weights) tensors.push_back({name, tensor, dtype});
  io::write_hf_weights(directory, tensors);
}

}  // namespace

void save_model(CausalLM& model,
                const std::string& config_from,
                const std::string& directory,
                at::ScalarType dtype,
                const std::map<std::string, at::Tensor>* weights) {
  dtype_name(dtype);
  if (::mkdir(directory.c_str(), 0777) != 0)
    io::throw_system_error(directory, "cannot create folder");
  try {
    write_all(
        model, config_from, directory, dtype, weights != nullptr ? *weights : masters_of(model));
    io::sync_directory(directory);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove_all(directory, ignored);
    throw;
  }
}

}  // namespace banyan::models
