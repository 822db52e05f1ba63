// The processes of a run as the shell hands them over.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "banyan/parallel/groups.h"

namespace banyan::bindings {

namespace py = pybind11;

// `ranks` = {"rank", "world_size", "mesh": {axis: size}, "groups": [name of each group of
// mesh_groups(), "" where this process is no member], "deadline_s"}; None: this process alone.
// Groups are found by the names that torch gave them.
// An object of the class Groups is taken as it is, with its counts of traffic.
std::shared_ptr<parallel::Groups> groups_from(const py::object& ranks);

// {"tp": 2, ...}: sizes of the axes; those that are not named are 1 ("shard" 0).
parallel::MeshShape mesh_shape_from(const py::dict& sizes);
py::dict to_dict(const parallel::MeshShape& shape);

}  // namespace banyan::bindings
