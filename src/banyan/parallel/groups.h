// The groups of ranks that this process belongs to, by what they are for (parallel/mesh.h). A group
// of one moves nothing. Each keeps its own count of traffic.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "banyan/parallel/collectives.h"
#include "banyan/parallel/mesh.h"

namespace banyan::parallel {

struct Groups {
  Collectives world;            // all ranks that train
  Collectives data;             // dp: ranks with different samples and equal parts of the weights
  Collectives tensor;           // tp: ranks with equal samples and different parts of each layer
  Collectives context;          // cp: ranks with different tokens of the same samples
  Collectives pipeline;         // pp: ranks with different layers
  Collectives model;            // tp x pp: ranks that hold one copy of the weights together
  Collectives embedding;        // first and last stage
  Collectives data_context;     // dp x cp: ranks that add the gradients of dense weights
  Collectives shard;            // of data x context: ranks over which FSDP cuts the weights
  Collectives replica;          // ranks with equal shards
  Collectives expert;           // ep
  Collectives expert_tensor;    // etp
  Collectives expert_model;     // etp x ep
  Collectives expert_data;      // edp: ranks that add the gradients of experts
  Collectives rollout;          // ranks that only generate, which are in no group above
  Collectives hand_over;        // these, behind the first that trains
  Collectives rollout_tensor;   // ranks that hold one rollout model, and generate the same
  Collectives rollout_experts;  // ranks that share the experts of a rollout model
  Collectives self;             // this rank alone, which is in no other group for it
};

// The transport of group `index` of Mesh::groups().
using TransportOf = std::function<std::shared_ptr<Transport>(int64_t index)>;

// The groups of `rank`. Asks for the transport of each group that it belongs to, once.
Groups make_groups(const Mesh& mesh, int64_t rank, const TransportOf& transport_of);

// Bytes that this rank has sent since the start, by "group/operation": "tp/all_gather".
std::map<std::string, int64_t> sent_bytes(const Groups& groups);
// The same since `before`, an earlier sent_bytes of these groups.
std::map<std::string, int64_t> sent_bytes_since(const std::map<std::string, int64_t>& before,
                                                const Groups& groups);

// The ranks that hold equal parts of the dense weights and add their gradients: `data`, or
// `data_context` where that is more.
Collectives& gradient_ranks(Groups& groups);

// All of one kind: `ranks` share the samples, and nothing is cut.
Groups data_parallel(const Collectives& ranks);

// True on a rank that only generates.
inline bool only_generates(const Groups& groups) { return groups.hand_over.rank() > 0; }

// True if no rank but this one holds a part of its copy of the weights.
bool holds_whole_model(const Groups& groups);

}  // namespace banyan::parallel
