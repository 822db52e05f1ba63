// What the keys say about how the processes of a run work together.
#pragma once

#include "banyan/core/config.h"
#include "banyan/parallel/mesh.h"

namespace banyan::train {

// The sizes of the axes; those of the actor hold for the run.
parallel::MeshShape mesh_shape(const Config& config);

}  // namespace banyan::train
