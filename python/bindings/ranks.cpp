// mesh_groups: which process groups the shell creates.
#include "ranks.h"

#include <algorithm>
#include <chrono>

#include "banyan/core/error.h"
#include "banyan/parallel/c10d_transport.h"
#include "banyan/parallel/mesh.h"
#include "convert.h"

namespace banyan::bindings {

parallel::Collectives data_parallel_from(const py::object& ranks) {
  if (ranks.is_none()) return {};
  const auto given = ranks.cast<py::dict>();
  const auto rank = given["rank"].cast<int64_t>();
  const parallel::Mesh mesh(given["world_size"].cast<int64_t>(), {});
  const int64_t group = mesh.group_of(parallel::Axis::kDp, rank);
  if (group < 0) return {};
  const std::vector<int64_t>& members = mesh.groups()[group].ranks;
  const auto names = given["groups"].cast<std::vector<std::string>>();
  BANYAN_ASSERT(names.size() == mesh.groups().size(), "groups: got ", names.size());
  const std::chrono::duration<double> deadline(given["deadline_s"].cast<double>());
  return {parallel::axis_name(parallel::Axis::kDp),
          members,
          std::find(members.begin(), members.end(), rank) - members.begin(),
          parallel::c10d_transport(
              names[group], std::chrono::duration_cast<std::chrono::milliseconds>(deadline))};
}

void bind_ranks(py::module_& module) {
  module.def(
      "mesh_groups",
      [](int64_t world_size) {
        std::vector<std::vector<int64_t>> groups;
        const parallel::Mesh mesh(world_size, {});
        for (const parallel::MeshGroup& group : mesh.groups()) {
          groups.push_back(group.ranks);
        }
        return groups;
      },
      py::arg("world_size"),
      "Ranks of every process group of a run, in the order in which all processes create them.");
}

}  // namespace banyan::bindings
