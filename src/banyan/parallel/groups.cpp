#include "banyan/parallel/groups.h"

#include <algorithm>
#include <map>

namespace banyan::parallel {

Groups make_groups(const Mesh& mesh, int64_t rank, const TransportOf& transport_of) {
  std::map<int64_t, std::shared_ptr<Transport>> transports;
  const auto along = [&](Axis axis) -> Collectives {
    const int64_t index = mesh.group_of(axis, rank);
    if (index < 0) return {};
    std::shared_ptr<Transport>& transport = transports[index];
    if (!transport) transport = transport_of(index);
    const std::vector<int64_t>& members = mesh.groups()[index].ranks;
    const int64_t place = std::find(members.begin(), members.end(), rank) - members.begin();
    return {axis_name(axis), members, place, transport};
  };
  Groups groups;
  groups.world = along(Axis::kWorld);
  groups.data = along(Axis::kDp);
  groups.tensor = along(Axis::kTp);
  groups.context = along(Axis::kCp);
  groups.pipeline = along(Axis::kPp);
  groups.model = along(Axis::kModel);
  groups.embedding = along(Axis::kEmbedding);
  groups.data_context = along(Axis::kDpCp);
  groups.shard = along(Axis::kShard);
  groups.replica = along(Axis::kReplica);
  groups.expert = along(Axis::kEp);
  groups.expert_tensor = along(Axis::kEtp);
  groups.expert_model = along(Axis::kEtpEp);
  groups.expert_data = along(Axis::kEdp);
  groups.rollout = along(Axis::kRollout);
  groups.hand_over = along(Axis::kHandOver);
  groups.rollout_tensor = along(Axis::kRolloutTp);
  groups.rollout_experts = along(Axis::kRolloutEp);
  return groups;
}

std::map<std::string, int64_t> sent_bytes(const Groups& groups) {
  std::map<std::string, int64_t> out;
  for (const Collectives* ranks : {&groups.world,
                                   &groups.data,
                                   &groups.tensor,
                                   &groups.context,
                                   &groups.pipeline,
                                   &groups.model,
                                   &groups.embedding,
                                   &groups.data_context,
                                   &groups.shard,
                                   &groups.replica,
                                   &groups.expert,
                                   &groups.expert_tensor,
                                   &groups.expert_model,
                                   &groups.expert_data,
                                   &groups.rollout,
                                   &groups.hand_over,
                                   &groups.rollout_tensor,
                                   &groups.rollout_experts}) {
    for (const auto& [op, traffic] : ranks->traffic()) {
      out[ranks->name() + "/" + op] += traffic.bytes;
    }
  }
  return out;
}

std::map<std::string, int64_t> sent_bytes_since(const std::map<std::string, int64_t>& before,
                                                const Groups& groups) {
  std::map<std::string, int64_t> out = sent_bytes(groups);
  for (const auto& [what, bytes] : before) out[what] -= bytes;
  return out;
}

Collectives& gradient_ranks(Groups& groups) {
  return groups.context.is_alone() ? groups.data : groups.data_context;
}

Groups data_parallel(const Collectives& ranks) {
  Groups groups;
  groups.world = groups.data = groups.data_context = groups.shard = groups.expert_data = ranks;
  return groups;
}

bool holds_whole_model(const Groups& groups) {
  return groups.model.is_alone() && groups.expert_model.is_alone();
}

}  // namespace banyan::parallel
