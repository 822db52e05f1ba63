// Qwen2 and Qwen2.5 (model_type "qwen2"): biases on q, k and v, none on o.
#include "banyan/models/architecture.h"

namespace banyan::models {

nn::DecoderOptions read_qwen2(const HfConfig& config) {
  nn::DecoderOptions options = config.decoder();
  options.qkv_bias = true;
  config.require_full_attention(options);
  return options;
}

}  // namespace banyan::models
