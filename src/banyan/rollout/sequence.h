// What the scheduler knows of the responses in progress. One counter per sequence: `computed`
// positions (with keys and values in pages) chase the `known` ones (prompt and tokens drawn so
// far); there are no phases. A decode is one position behind, a sequence that lost its pages many.
// Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/rollout/prefix_tree.h"

namespace banyan::rollout {

enum class SequenceState : uint8_t {
  kWaiting,  // no pages: not started, or preempted
  kRunning,  // has pages for every known position
  kFinished,
};

// One response: a child of its group, running only once the prompt's keys and values exist.
struct Sequence {
  int32_t index = 0;  // sample index: part of the noise key
  SequenceState state = SequenceState::kWaiting;
  int32_t computed = 0;           // positions, prompt included; meaningful while running
  std::vector<int32_t> pages;     // its own, from position prompt / kPageTokens * kPageTokens on
  std::vector<int32_t> response;  // tokens drawn so far
  std::vector<float> logprobs;    // one per token
  std::vector<float> sampled_logprobs;  // of the truncated law; empty unless there is one
};

// The responses of one prompt. `path` is the prompt in the prefix tree: the trunk that they share.
struct Group {
  int64_t row = 0;
  std::vector<int32_t> prompt;
  int32_t max_new = 0;  // tokens a response may have
  std::vector<Sequence> sequences;

  PrefixTree::Path path;
  int32_t num_held = 0;  // leading nodes of the path that the group holds
  bool drawn = false;    // the first token of every response is drawn
  int32_t num_finished = 0;

  int32_t prompt_length() const { return static_cast<int32_t>(prompt.size()); }
  // Pages of the trunk that a child reads in place; its own pages follow.
  int32_t num_trunk_pages() const { return prompt_length() / kPageTokens; }
  int32_t known(const Sequence& sequence) const {
    return prompt_length() + static_cast<int32_t>(sequence.response.size());
  }
  bool finished() const { return num_finished == static_cast<int32_t>(sequences.size()); }
};

}  // namespace banyan::rollout
