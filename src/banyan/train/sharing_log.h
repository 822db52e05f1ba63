// The text of prefix-0501's log lines, `[PS][prepare] ...` and so on (specification B6). Values
// print as Python prints them: True, None, [1, 2], (7, 2, 4); ratios with four decimals. What
// exists only in that design, such as keys expanded per reuser, is marked "(logical)". Functions of
// their arguments only; train/sharing_observer.h says when which line is due. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "banyan/trie/sharing_layout.h"

namespace banyan::train {

// off < summary < layer < profile < debug: what is printed, each level with all below it.
enum class ObserveLevel : uint8_t { kOff, kSummary, kLayer, kProfile, kDebug };

// Throws [config] naming actor_rollout_ref.sharing.observe for another word. "" is off.
ObserveLevel observe_level(const std::string& name);

// Where a process stands in its meshes; what nobody knows prints as `unknown`.
struct RankInfo {
  std::optional<int64_t> global_rank;
  int64_t tp_rank = 0;
  int64_t tp_size = 1;
  int64_t pp_rank = 0;
  int64_t pp_size = 1;
  int64_t cp_rank = 0;
  int64_t cp_size = 1;
  bool sequence_parallel = false;

  bool is_pp_first() const { return pp_rank == 0; }
  bool is_pp_last() const { return pp_rank == pp_size - 1; }
};

// Sizes of a tensor, printed as a tuple.
using Shape = std::vector<int64_t>;

namespace sharing_log {

std::string repr(bool value);
std::string repr(const std::vector<int32_t>& values);      // [1, 2]
std::string repr(const std::vector<std::string>& values);  // ['a', 'b']
std::string repr(const std::vector<trie::Range>& ranges);  // [(0, 7), (3, 6)]
std::string repr(const std::vector<trie::PrefixLastRestore>& restores);
std::string tuple(const Shape& shape);          // (7, 2, 4)
std::string torch_size(const Shape& shape);     // torch.Size([2, 5])
std::string rank_fields(const RankInfo& rank);  // global_rank=0 tp_rank=0/1

// ---- prepare: one pass over some samples -------------------------------------------------------
std::string enter(int64_t batch_size, const std::vector<std::string>& batch_keys);
std::string disabled();                                                 // PATH 1
std::string enabled();                                                  // validating
std::vector<std::string> checks_passed(int64_t rows, int64_t longest);  // debug: what holds always
std::string sequences(const std::vector<int32_t>& lengths);
std::string plan_result(const trie::SharingPlan& plan);
std::string no_sharing(const std::string& decision);  // PATH 5; a decision other than "on" is added
std::string sharing_detected();                       // PATH 6
std::string packed_layout(const RankInfo& rank, const trie::PackedLayout& layout);
std::string prepared(const trie::SharingPlan& plan);  // PATH 6 DONE

// ---- one attention call ------------------------------------------------------------------------
struct AttentionCall {
  int64_t layer = 0;
  Shape query, key, value;             // of the tensors that the layer really passed
  std::vector<int32_t> valid_lengths;  // per row: tokens that the row is first to compute here
  int64_t expanded_tokens = 0;         // logical: keys if every row had its own copy
};
std::string attention(const RankInfo& rank, const AttentionCall& call, int32_t align_size);
std::string expanded_kv(const RankInfo& rank, const AttentionCall& call);
std::string backend(const std::string& name, const AttentionCall& call);

// ---- audit: what the run measured --------------------------------------------------------------
struct Measured {
  int64_t kept_valid_tokens = 0;  // tokens that went through the attention of each layer
  int64_t kept_padded_tokens = 0;
  int64_t actual_restore_count = 0;  // reusers whose log-probabilities came out
  // banyan's own fields.
  int64_t unique_tokens = 0;  // T1
  int64_t segments = 0;
  int64_t forks = 0;
  int64_t blocks = 0;       // blocks that ran
  int64_t open_tokens = 0;  // tokens whose keys later blocks read
  std::string decision;     // on | off | auto's choice
};
std::string audit_summary(const RankInfo& rank,
                          const trie::SharingStatistics& plan,
                          const Measured& measured);
std::string runtime_missing(const RankInfo& rank, const trie::SharingStatistics& plan);

struct LayerRecord {
  int64_t layer = 0;
  int64_t store_count = 0;  // rows whose own keys and values were computed
  int64_t reuse_count = 0;  // reusers that ran
  int64_t reuse_hit_count = 0;
  int64_t reuse_miss_count = 0;  // their provider had not run yet
  int64_t stored_tokens = 0;     // keys and values computed, each once
  int64_t reused_prefix_tokens = 0;
  int64_t expanded_kv_tokens = 0;  // logical
  int64_t valid_q_tokens = 0;
  int64_t padded_q_tokens = 0;
  int64_t recomputed_q_tokens = 0;  // forward once more for their backward
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;

  // Reuse as planned, and nothing missing.
  bool matches(const trie::SharingStatistics& plan) const;
};
std::string audit_layer(const RankInfo& rank,
                        const LayerRecord& record,
                        const trie::SharingStatistics& plan);
std::string profile_layer(const RankInfo& rank, const LayerRecord& record);

// ---- other lines -------------------------------------------------------------------------------
std::string restored(int64_t rows, int64_t longest, int64_t reusers_with_suffix);
std::string trimming(int64_t expected_total,
                     int64_t actual_total,
                     const std::vector<int32_t>& prompt_lens,
                     const std::vector<int32_t>& trimmed_prompt_lens,
                     const std::vector<int32_t>& response_lens);
std::string forward_step(const RankInfo& rank,
                         const std::string& event,
                         const std::vector<std::pair<std::string, std::string>>& values);

}  // namespace sharing_log
}  // namespace banyan::train
