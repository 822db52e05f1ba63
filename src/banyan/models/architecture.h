// One architecture: how its config.json becomes DecoderOptions. Tensor names are those of
// nn/decoder.h for all of them; names that old files carry beside (RoPE buffers) are ignored for
// all of them.
#pragma once

#include "banyan/core/registry.h"
#include "banyan/models/hf_config.h"

namespace banyan::models {

using ReadConfig = nn::DecoderOptions (*)(const HfConfig& config);

nn::DecoderOptions read_llama(const HfConfig& config);
nn::DecoderOptions read_qwen2(const HfConfig& config);
nn::DecoderOptions read_qwen3(const HfConfig& config);
nn::DecoderOptions read_qwen3_moe(const HfConfig& config);

// By config.json's model_type; a new architecture is one file and one line in registry.cpp.
const Registry<ReadConfig>& architectures();

}  // namespace banyan::models
