// The processes of a run as the shell hands them over.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "banyan/parallel/collectives.h"

namespace banyan::bindings {

namespace py = pybind11;

// `ranks` = {"rank", "world_size", "groups": [name of each group of mesh_groups(), "" where this
// process is no member], "deadline_s"}; None: this process alone. Groups are found by the names
// that torch gave them.
parallel::Collectives data_parallel_from(const py::object& ranks);

}  // namespace banyan::bindings
