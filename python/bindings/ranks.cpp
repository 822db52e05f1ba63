// mesh_groups: which process groups the shell creates.
#include "ranks.h"

#include <chrono>
#include <map>
#include <string>

#include "banyan/core/error.h"
#include "banyan/parallel/c10d_transport.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

constexpr const char* kFinetunes = "finetunes";  // the shape's one word that is no size

std::map<std::string, int64_t*> sizes_of(parallel::MeshShape& shape) {
  return {{"tp", &shape.tp},
          {"cp", &shape.cp},
          {"ep", &shape.ep},
          {"pp", &shape.pp},
          {"etp", &shape.etp},
          {"shard", &shape.shard},
          {"rollout", &shape.rollout},
          {"rollout_tp", &shape.rollout_tp},
          {"rollout_ep", &shape.rollout_ep}};
}

}  // namespace

parallel::MeshShape mesh_shape_from(const py::dict& sizes) {
  parallel::MeshShape shape;
  const std::map<std::string, int64_t*> fields = sizes_of(shape);
  for (const auto& [name, size] : sizes) {
    if (name.cast<std::string>() == kFinetunes) {
      shape.finetunes = size.cast<bool>();
      continue;
    }
    const auto field = fields.find(name.cast<std::string>());
    BANYAN_CHECK(
        field != fields.end(),
        "[parallel] mesh: wanted tp, cp, ep, pp, etp, shard, rollout, rollout_tp or rollout_ep, "
        "got ",
        name.cast<std::string>());
    *field->second = size.cast<int64_t>();
  }
  return shape;
}

py::dict to_dict(const parallel::MeshShape& shape) {
  parallel::MeshShape copy = shape;
  py::dict out;
  for (const auto& [name, size] : sizes_of(copy)) out[name.c_str()] = *size;
  if (shape.finetunes) out[kFinetunes] = true;
  return out;
}

std::shared_ptr<parallel::Groups> groups_from(const py::object& ranks) {
  if (ranks.is_none()) return std::make_shared<parallel::Groups>();
  if (py::isinstance<parallel::Groups>(ranks)) {
    return ranks.cast<std::shared_ptr<parallel::Groups>>();
  }
  const auto given = ranks.cast<py::dict>();
  const parallel::Mesh mesh(given["world_size"].cast<int64_t>(),
                            mesh_shape_from(given["mesh"].cast<py::dict>()));
  const auto names = given["groups"].cast<std::vector<std::string>>();
  BANYAN_ASSERT(names.size() == mesh.groups().size(), "groups: got ", names.size());
  const std::chrono::duration<double> deadline(given["deadline_s"].cast<double>());
  const auto transport = [&](int64_t index) {
    return parallel::c10d_transport(
        names[index], std::chrono::duration_cast<std::chrono::milliseconds>(deadline));
  };
  return std::make_shared<parallel::Groups>(
      parallel::make_groups(mesh, given["rank"].cast<int64_t>(), transport));
}

void bind_ranks(py::module_& module) {
  py::class_<parallel::Groups, std::shared_ptr<parallel::Groups>>(
      module, "Groups", "The groups of ranks that this process belongs to.")
      .def(py::init(&groups_from), py::arg("ranks"))
      .def("sent_bytes",
           &parallel::sent_bytes,
           "Bytes that this rank has sent since the start, by 'group/operation'.");
  module.def(
      "mesh_groups",
      [](int64_t world_size, const py::kwargs& sizes) {
        std::vector<std::vector<int64_t>> groups;
        const parallel::Mesh mesh(world_size, mesh_shape_from(sizes));
        for (const parallel::MeshGroup& group : mesh.groups()) {
          groups.push_back(group.ranks);
        }
        return groups;
      },
      py::arg("world_size"),
      "Ranks of every process group of a run, in the order in which all processes create them. "
      "Sizes of the axes (tp=2, ...) other than 1 are named.");
}

}  // namespace banyan::bindings
