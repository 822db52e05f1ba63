// Llama 2, 3.x and SmolLM2 (model_type "llama"): no biases unless the config asks for them,
// head_dim defaults to hidden_size / num_attention_heads (also when it is null).
#include "banyan/models/architecture.h"

namespace banyan::models {

nn::DecoderOptions read_llama(const HfConfig& config) {
  nn::DecoderOptions options = config.decoder();
  options.qkv_bias = options.out_bias = config.fields().flag_or("attention_bias", false);
  options.mlp_bias = config.fields().flag_or("mlp_bias", false);
  return options;
}

}  // namespace banyan::models
