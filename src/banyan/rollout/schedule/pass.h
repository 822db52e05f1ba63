// What one forward pass computes. The runner turns it into tensors. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/rollout/memory/page_pool.h"

namespace banyan::rollout {

inline constexpr int32_t kTrunk = -1;  // in place of a child: the group's prompt

// Consecutive tokens of a child or of a trunk. Their pages: Scheduler::pages_of.
struct Run {
  int32_t group = 0;
  int32_t child = kTrunk;
  int32_t first_position = 0;
  int32_t num_tokens = 0;
};

// A row of the pass whose logits are drawn from: once for a child; for kTrunk, the end of a prompt,
// once for each child that is not finished. Several groups with one prompt may share a row.
struct DrawRow {
  int32_t row = 0;  // token of the pass
  int32_t group = 0;
  int32_t child = kTrunk;
};

// Rows of a prompt whose logits are asked for (GroupRequest::score_prompt). Positions may come
// again if the prompt had to be computed again.
struct PromptRows {
  int32_t row = 0;  // token of the pass
  int32_t group = 0;
  int32_t first_position = 0;
  int32_t num_tokens = 0;
};

struct Pass {
  std::vector<PageCopy> copies;  // before the forward, strictly in order
  // First the decodes: one token each, at rows 0, 1, ...; children of a group, and groups that
  // share pages, next to each other. Then longer pieces of children. Then pieces of prompts; who
  // computes a shared page stands before who reads it in the same pass.
  std::vector<Run> runs;
  int32_t num_decode_runs = 0;
  std::vector<DrawRow> decodes;  // rows of children, ascending
  std::vector<DrawRow> trunks;   // rows of prompts, ascending; after those of the children
  std::vector<PromptRows> prompt_rows;
  int32_t num_tokens = 0;
  int32_t num_prompt_tokens = 0;  // of trunks

  void clear();
};

}  // namespace banyan::rollout
