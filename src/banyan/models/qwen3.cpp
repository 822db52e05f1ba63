// Qwen3 (model_type "qwen3"): RMSNorm of every query and key head before RoPE, explicit head_dim,
// no biases unless the config asks for them.
#include "banyan/models/architecture.h"

namespace banyan::models {

nn::DecoderOptions read_qwen3(const HfConfig& config) {
  nn::DecoderOptions options = config.decoder();
  options.qk_norm = true;
  options.qkv_bias = options.out_bias = config.fields().flag_or("attention_bias", false);
  config.require_full_attention(options);
  return options;
}

}  // namespace banyan::models
