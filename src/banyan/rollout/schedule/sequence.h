// What the scheduler knows of the responses in progress. One counter per sequence: `computed`
// positions (with keys and values in pages) chase the `known` ones (prompt and tokens drawn so
// far); there are no phases. A decode is one position behind, a sequence that lost its pages many.
// Torch-free.
//
// Pages of a running child, from position 0 on (`table`):
//   [0, num_trunk_pages)   whole pages of the prompt, held by the group through its path
//   [.., + path.size())    pages of its own that are whole and published in the prefix tree
//   the rest               private; the first may be the prompt's partial last page, shared until
//                          the child writes to it
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "banyan/rollout/memory/prefix_tree.h"

namespace banyan::rollout {

// One prompt and its n responses, as they are added.
struct GroupRequest {
  std::vector<int32_t> prompt;  // at least one token
  int32_t n = 1;
  int32_t max_new = 0;        // tokens that a response may have; 0: only the prompt is computed
  bool ignore_eos = false;    // every response will have max_new tokens
  bool score_prompt = false;  // rows of the whole prompt are wanted: the cache is not read
  int32_t priority = 0;       // lower first
  std::string salt{};         // prefixes are shared under equal salts only
  std::string source{};       // data source, for the expected length
  std::string group_id{};     // see Request; empty: by itself
};

struct Group;

// Requests that are scheduled as one (GroupRequest::group_id).
struct Unit {
  int64_t arrival = 0;     // of the first
  double opened = 0.0;     // when that was
  int64_t seniority = -1;  // of the one admitted first; -1: none was
  std::vector<const Group*> queued{};
};

enum class SequenceState : uint8_t {
  kWaiting,  // no pages: not started, preempted, or in host memory
  kRunning,  // has pages for every known position
  kFinished,
};

// One response: a child of its group, running only once the prompt's keys and values exist.
struct Sequence {
  SequenceState state = SequenceState::kWaiting;
  int32_t computed = 0;           // positions, prompt included; meaningful while running or spilled
  std::vector<int32_t> table;     // pages, see above; empty unless running
  PrefixTree::Path path;          // published nodes that it holds
  std::vector<int32_t> host;      // slots in host memory of what followed the trunk's whole pages
  std::vector<int32_t> response;  // tokens drawn so far
  int32_t num_retractions = 0;    // times that it lost its pages
};

// The responses of one prompt. `path` is the prompt in the prefix tree: the trunk that they share.
struct Group {
  int32_t id = 0;
  int64_t arrival = 0;
  GroupRequest request;
  std::shared_ptr<Unit> unit;  // null: by itself
  std::vector<Sequence> sequences;

  PrefixTree::Path path;
  int32_t root = -1;           // node above the path
  int32_t num_held = 0;        // leading nodes of the path that the group holds
  std::vector<int32_t> table;  // their pages
  int64_t seniority = -1;      // order of first admission; -1: still in the queue
  bool drawn = false;          // the first token of every response is drawn
  // Kept across a switch of the weights: computes on old keys and values and publishes nothing.
  bool tainted = false;
  int32_t num_finished = 0;
  int32_t num_computed = 0;  // prompt tokens computed for this group
  int32_t num_cached = 0;    // prompt tokens found computed, known once drawn
  int32_t source = 0;        // LengthEstimate's number of the data source
  int32_t rank = 0;          // among the started groups, neighbours in the tree together

  const std::vector<int32_t>& prompt() const { return request.prompt; }
  int32_t prompt_length() const { return static_cast<int32_t>(request.prompt.size()); }
  int32_t size() const { return static_cast<int32_t>(sequences.size()); }
  // Pages of the trunk that a child reads in place; its own pages follow.
  int32_t num_trunk_pages() const { return prompt_length() / kPageTokens; }
  bool holds_trunk() const { return num_held == static_cast<int32_t>(path.size()); }
  int32_t num_in(SequenceState state) const {
    int32_t count = 0;
    for (const Sequence& sequence : sequences) count += sequence.state == state;
    return count;
  }
  int32_t known(const Sequence& sequence) const {
    return prompt_length() + static_cast<int32_t>(sequence.response.size());
  }
  int32_t token_at(const Sequence& sequence, int32_t position) const {
    return position < prompt_length() ? request.prompt[position]
                                      : sequence.response[position - prompt_length()];
  }
  bool finished() const { return num_finished == size(); }
  // Its place in the queue, and among those admitted.
  int64_t place() const { return unit ? unit->arrival : arrival; }
  int64_t lead() const { return unit ? unit->seniority : seniority; }
};

}  // namespace banyan::rollout
