// Mesh: which ranks work together on what (specification parallel 2). The axes are laid out in the
// order tp-cp-ep-dp-pp, leftmost fastest:
//   dense   rank = tp + TP (cp + CP (dp + DP pp))         DP  = world / (TP CP PP)
//   expert  rank = etp + ETP (ep + EP (edp + EDP pp))     EDP = world / (ETP EP PP)
// so CP and a part of DP fold into EP. `rollout` further ranks come after these and only generate;
// world is the number of those that train. Hybrid sharding cuts the ranks of dp x cp into `shard`
// neighbours that hold one copy of the weights, and `replica` copies. A group is all ranks that are
// equal on the other axes; groups with equal members are one group. Those that generate (the ranks
// that only do, or else all) are cut into neighbours once more, for the rollout's model.
// Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace banyan::parallel {

// Sizes of the axes; dp and edp follow from the number of ranks.
struct MeshShape {
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t ep = 1;
  int64_t pp = 1;
  int64_t etp = 1;
  int64_t shard = 0;    // ranks of dp x cp that hold one copy of the weights; 0: all of them
  int64_t rollout = 0;  // ranks behind the others that only generate
  // Of those that generate, whoever they are: neighbours that hold one rollout model together, and
  // that share its experts (1, or all ranks of one replica).
  int64_t rollout_tp = 1;
  int64_t rollout_ep = 1;
  bool finetunes = false;  // messages name the keys of engine in the place of the actor's
};

enum class Axis : uint8_t {
  kWorld,
  kTp,
  kCp,
  kDp,
  kPp,
  kDpCp,       // gradients of dense weights
  kTpCp,       // statistics of experts
  kModel,      // tp x pp: one copy of the model
  kEmbedding,  // first and last stage: the two copies of tied embeddings
  kEtp,
  kEp,
  kEtpEp,
  kEdp,        // gradients of experts
  kShard,      // weights cut over these ranks
  kReplica,    // equal shards
  kRollout,    // those that only generate
  kHandOver,   // the first that trains, and those that only generate
  kRolloutTp,  // one rollout model
  kRolloutEp,  // its experts
};
inline constexpr int64_t kNumAxes = 19;
const char* axis_name(Axis axis);  // "dp", "dp_cp", ...

struct MeshGroup {
  std::vector<Axis> axes;      // that it serves, in the order of Axis
  std::vector<int64_t> ranks;  // ascending along the axis; at least two
};

class Mesh {
 public:
  // Throws [config] naming the keys of the sizes where they do not divide the number of ranks that
  // train.
  Mesh(int64_t num_processes, const MeshShape& shape);

  int64_t size(Axis axis) const;

  // Every group of two and more ranks, in the one order in which all ranks create them.
  const std::vector<MeshGroup>& groups() const { return groups_; }
  // The ranks that `rank` works with along an axis; only itself where the axis has size 1.
  std::vector<int64_t> ranks_of(Axis axis, int64_t rank) const;
  // Their place in groups(); -1 for a group of one.
  int64_t group_of(Axis axis, int64_t rank) const;

  // Where a rank stands: "rank 5 (tp 1, dp 2)"; only axes with more than one place.
  std::string describe(int64_t rank) const;

 private:
  std::vector<int64_t> coordinates(Axis axis, int64_t rank) const;
  std::vector<int64_t> neighbours(int64_t size, int64_t rank) const;  // that generate

  int64_t num_processes_;
  int64_t world_size_;  // ranks that train
  MeshShape shape_;
  int64_t dp_ = 1;
  int64_t edp_ = 1;
  std::vector<MeshGroup> groups_;
};

}  // namespace banyan::parallel
