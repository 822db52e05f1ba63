#include "banyan/parallel/mesh.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

constexpr std::array<const char*, kNumAxes> kNames = {"world",
                                                      "tp",
                                                      "cp",
                                                      "dp",
                                                      "pp",
                                                      "dp_cp",
                                                      "tp_cp",
                                                      "model",
                                                      "embedding",
                                                      "etp",
                                                      "ep",
                                                      "etp_ep",
                                                      "edp",
                                                      "shard",
                                                      "replica",
                                                      "rollout",
                                                      "hand_over",
                                                      "rollout_tp",
                                                      "rollout_ep"};

struct Size {
  int64_t value;
  std::string key;
};

// The product of some sizes divides the processes. Named are those that are more than one.
void check_divides(int64_t world_size, std::initializer_list<Size> sizes) {
  int64_t product = 1;
  std::string names;
  for (const Size& size : sizes) {
    BANYAN_CHECK(size.value >= 1, "[config] ", size.key, ": wanted >= 1, got ", size.value);
    product *= size.value;
    if (size.value > 1) names += (names.empty() ? "" : " x ") + size.key;
  }
  BANYAN_CHECK(world_size % product == 0,
               "[config] ",
               names,
               ": wanted a divisor of the number of processes (",
               world_size,
               "), got ",
               product);
}

}  // namespace

const char* axis_name(Axis axis) { return kNames.at(static_cast<size_t>(axis)); }

Mesh::Mesh(int64_t num_processes, const MeshShape& shape)
    : num_processes_(num_processes), world_size_(num_processes - shape.rollout), shape_(shape) {
  BANYAN_CHECK(num_processes >= 1, "[parallel] processes: wanted >= 1, got ", num_processes);
  BANYAN_CHECK(world_size_ >= 1,
               "[config] actor_rollout_ref.rollout.nnodes x n_gpus_per_node: wanted fewer than the "
               "processes (",
               num_processes,
               "), got ",
               shape.rollout);
  const int64_t world_size = world_size_;
  const std::string role = shape.finetunes ? "engine." : "actor_rollout_ref.actor.";
  const std::string keys = shape.finetunes ? role : role + "megatron.";
  const Size stages = {shape.pp, keys + "pipeline_model_parallel_size"};
  check_divides(
      world_size,
      {{shape.tp, keys + "tensor_model_parallel_size"},
       {shape.cp, keys + "context_parallel_size (or " + role + "ulysses_sequence_parallel_size)"},
       stages});
  check_divides(world_size,
                {{shape.etp, keys + "expert_tensor_parallel_size"},
                 {shape.ep, keys + "expert_model_parallel_size"},
                 stages});
  dp_ = world_size / (shape.tp * shape.cp * shape.pp);
  edp_ = world_size / (shape.etp * shape.ep * shape.pp);
  if (shape_.shard <= 0 || shape_.shard > dp_ * shape.cp) shape_.shard = dp_ * shape.cp;
  BANYAN_CHECK(dp_ * shape.cp % shape_.shard == 0,
               "[config] ",
               shape.finetunes ? role : role + "fsdp_config.",
               "fsdp_size: wanted a divisor of data x context parallel size (",
               dp_ * shape.cp,
               "), got ",
               shape_.shard);
  const int64_t generating = shape.rollout > 0 ? shape.rollout : world_size;
  const auto check_neighbours = [&](const char* key, int64_t size) {
    BANYAN_CHECK(size >= 1 && generating % size == 0,
                 "[config] actor_rollout_ref.rollout.",
                 key,
                 ": wanted a divisor of the number of processes that generate (",
                 generating,
                 "), got ",
                 size);
  };
  check_neighbours("tensor_model_parallel_size", shape.rollout_tp);
  check_neighbours("expert_parallel_size", shape.rollout_ep);
  for (int64_t axis = 0; axis < kNumAxes; ++axis) {
    for (int64_t rank = 0; rank < num_processes; ++rank) {
      std::vector<int64_t> ranks = ranks_of(static_cast<Axis>(axis), rank);
      if (ranks.size() < 2 || ranks.front() != rank) continue;
      const auto same = std::find_if(groups_.begin(), groups_.end(), [&](const MeshGroup& group) {
        return group.ranks == ranks;
      });
      if (same == groups_.end()) {
        groups_.push_back({{static_cast<Axis>(axis)}, std::move(ranks)});
      } else {
        same->axes.push_back(static_cast<Axis>(axis));
      }
    }
  }
}

// What must be equal for two ranks to be of one group along `axis`.
std::vector<int64_t> Mesh::coordinates(Axis axis, int64_t rank) const {
  const int64_t tp = rank % shape_.tp;
  const int64_t cp = rank / shape_.tp % shape_.cp;
  const int64_t dp = rank / (shape_.tp * shape_.cp) % dp_;
  const int64_t pp = rank / (world_size_ / shape_.pp);
  const int64_t etp = rank % shape_.etp;
  const int64_t ep = rank / shape_.etp % shape_.ep;
  const int64_t edp = rank / (shape_.etp * shape_.ep) % edp_;
  const int64_t dp_cp = cp + shape_.cp * dp;
  const bool is_end = pp == 0 || pp == shape_.pp - 1;
  switch (axis) {
    case Axis::kWorld:
      return {};
    case Axis::kTp:
      return {cp, dp, pp};
    case Axis::kCp:
      return {tp, dp, pp};
    case Axis::kDp:
      return {tp, cp, pp};
    case Axis::kPp:
      return {tp, cp, dp};
    case Axis::kDpCp:
      return {tp, pp};
    case Axis::kTpCp:
      return {dp, pp};
    case Axis::kModel:
      return {cp, dp};
    case Axis::kEmbedding:
      return {tp, cp, dp, is_end ? -1 : pp};
    case Axis::kEtp:
      return {ep, edp, pp};
    case Axis::kEp:
      return {etp, edp, pp};
    case Axis::kEtpEp:
      return {edp, pp};
    case Axis::kEdp:
      return {etp, ep, pp};
    case Axis::kShard:
      return {tp, pp, dp_cp / shape_.shard};
    case Axis::kReplica:
      return {tp, pp, dp_cp % shape_.shard};
    case Axis::kRollout:
    case Axis::kHandOver:
    case Axis::kRolloutTp:
    case Axis::kRolloutEp:
      break;
  }
  return {};
}

std::vector<int64_t> Mesh::neighbours(int64_t size, int64_t rank) const {
  const int64_t first = shape_.rollout > 0 ? world_size_ : 0;
  if (rank < first) return {rank};
  std::vector<int64_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), first + (rank - first) / size * size);
  return ranks;
}

std::vector<int64_t> Mesh::ranks_of(Axis axis, int64_t rank) const {
  BANYAN_ASSERT(rank >= 0 && rank < num_processes_, "rank ", rank, " of ", num_processes_);
  if (axis == Axis::kRolloutTp) return neighbours(shape_.rollout_tp, rank);
  if (axis == Axis::kRolloutEp) return neighbours(shape_.rollout_ep, rank);
  const bool only_generates = rank >= world_size_;
  if (axis == Axis::kRollout || axis == Axis::kHandOver) {
    const bool hands_over = axis == Axis::kHandOver && rank == 0;
    if (!only_generates && !hands_over) return {rank};
    std::vector<int64_t> ranks;
    if (axis == Axis::kHandOver) ranks.push_back(0);
    for (int64_t other = world_size_; other < num_processes_; ++other) ranks.push_back(other);
    return ranks;
  }
  if (only_generates) return {rank};
  const std::vector<int64_t> mine = coordinates(axis, rank);
  std::vector<int64_t> ranks;
  for (int64_t other = 0; other < world_size_; ++other) {
    if (coordinates(axis, other) == mine) ranks.push_back(other);
  }
  return ranks;
}

int64_t Mesh::group_of(Axis axis, int64_t rank) const {
  const std::vector<int64_t> ranks = ranks_of(axis, rank);
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i].ranks == ranks) return static_cast<int64_t>(i);
  }
  return -1;
}

int64_t Mesh::size(Axis axis) const { return static_cast<int64_t>(ranks_of(axis, 0).size()); }

std::string Mesh::describe(int64_t rank) const {
  std::string where;
  for (const Axis axis : {Axis::kTp, Axis::kCp, Axis::kDp, Axis::kPp, Axis::kRollout}) {
    const std::vector<int64_t> ranks = ranks_of(axis, rank);
    if (ranks.size() < 2) continue;
    const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    where += detail::concat(where.empty() ? "" : ", ", axis_name(axis), " ", place);
  }
  return detail::concat("rank ", rank, where.empty() ? "" : " (" + where + ")");
}

}  // namespace banyan::parallel
