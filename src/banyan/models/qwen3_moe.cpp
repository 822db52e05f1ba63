// Qwen3-MoE (model_type "qwen3_moe"): Qwen3's attention; feed-forward layers with experts except
// those of mlp_only_layers and those that decoder_sparse_step leaves out. router_aux_loss_coef is
// pretraining's and not read: the weights of the auxiliary losses are keys of the run.
#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/models/architecture.h"

namespace banyan::models {
namespace {

constexpr int64_t kMaxExperts = 1 << 14;
constexpr int64_t kMaxWidth = int64_t{1} << 28;

std::vector<int64_t> layer_list(const JsonFields& fields, const char* key) {
  std::vector<int64_t> layers;
  const io::Json* list = fields.find(key);
  if (list == nullptr) return layers;
  const bool good =
      list->is_array() && std::all_of(list->begin(), list->end(), [](const io::Json& layer) {
        return layer.is_number_integer();
      });
  if (!good) fields.refuse(key, "wanted a list of layers, got " + JsonFields::shown(*list));
  for (const io::Json& layer : *list) layers.push_back(layer.get<int64_t>());
  return layers;
}

}  // namespace

nn::DecoderOptions read_qwen3_moe(const HfConfig& config) {
  const JsonFields& fields = config.fields();
  nn::DecoderOptions options = config.decoder();
  options.qk_norm = true;
  options.qkv_bias = options.out_bias = fields.flag_or("attention_bias", false);
  config.require_full_attention(options);
  // Here the window, if it is used, is every layer's.
  if (fields.flag_or("use_sliding_window", false) &&
      fields.size_or("sliding_window", 4096, kMaxWidth) < options.max_positions) {
    fields.refuse("use_sliding_window", "sliding-window attention is not supported");
  }
  nn::MoeOptions& moe = options.moe;
  const char* count = fields.has("num_local_experts") ? "num_local_experts" : "num_experts";
  moe.num_experts = fields.size(count, kMaxExperts);
  moe.num_chosen = fields.size("num_experts_per_tok", moe.num_experts);
  moe.intermediate = fields.size("moe_intermediate_size", kMaxWidth);
  moe.renormalise = fields.flag_or("norm_topk_prob", false);
  moe.sparse_step = fields.size_or("decoder_sparse_step", 1, options.layers);
  moe.dense_layers = layer_list(fields, "mlp_only_layers");
  return options;
}

}  // namespace banyan::models
