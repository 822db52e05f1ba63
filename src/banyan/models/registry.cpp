// The list of architectures, by config.json's model_type.
#include "banyan/models/architecture.h"

namespace banyan::models {

const Registry<ReadConfig>& architectures() {
  static const Registry<ReadConfig> registry = [] {
    Registry<ReadConfig> list("model");
    list.add("llama", read_llama);
    list.add("qwen2", read_qwen2);
    list.add("qwen3", read_qwen3);
    list.add("qwen3_moe", read_qwen3_moe);
    return list;
  }();
  return registry;
}

}  // namespace banyan::models
