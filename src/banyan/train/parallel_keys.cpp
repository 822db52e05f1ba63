#include "banyan/train/parallel_keys.h"

#include <algorithm>

namespace banyan::train {

parallel::MeshShape mesh_shape(const Config& config) {
  return {.shard = std::max<int64_t>(0, config.actor.fsdp.fsdp_size)};
}

}  // namespace banyan::train
