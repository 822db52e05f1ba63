// The provider/reuser plan (specification B5, "Plan", "Trim"): which tokens of each row remain to
// be computed, written as vectors over the rows in batch order. A row with prefix P keeps tokens
// [P, n); its queries start at position P and see n keys. Torch-free; a view for logs, statistics
// and tools.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/trie/sharing_detect.h"
#include "banyan/trie/trie.h"

namespace banyan::trie {

// The log-probability that a reuser needs from its provider's last shared token: that token
// (position P - 1) predicts the reuser's first suffix token.
struct PrefixLastRestore {
  int32_t reuse_idx = 0;
  int32_t provider_idx = 0;
  int32_t group_id = 0;
  int32_t target_2d_pos = 0;  // P - 1
  int32_t label_value = 0;    // first suffix token
  friend bool operator==(const PrefixLastRestore&, const PrefixLastRestore&) = default;
};

struct SharingPlan {
  int64_t forward_id = 0;      // counts passes of the run from 1
  int64_t micro_batch_id = 0;  // counts passes of one kind from 1
  int32_t batch_size = 0;
  std::vector<ReuseSpec> reuse_specs;
  int32_t num_groups = 0;

  // Per row.
  std::vector<int32_t> original_lengths;
  std::vector<int32_t> group_ids;
  std::vector<uint8_t> is_provider;
  std::vector<int32_t> provider_index;
  std::vector<int32_t> prefix_lens;
  std::vector<int32_t> suffix_lens;
  std::vector<int32_t> kept_lengths_q;       // = suffix_lens
  std::vector<int32_t> expanded_lengths_kv;  // = original_lengths: keys that the row sees
  std::vector<int32_t> q_position_offsets;   // P, or 0
  std::vector<int32_t> kv_position_offsets;  // 0
  std::vector<Range> input_keep_ranges;      // tokens [P, n) of the row
  std::vector<Range> label_keep_ranges;
  std::vector<Range> loss_mask_keep_ranges;

  std::vector<int32_t> cu_seqlens_q;   // batch_size + 1
  std::vector<int32_t> cu_seqlens_kv;  // batch_size + 1
  int32_t max_seqlen_q = 0;
  int32_t max_seqlen_kv = 0;
  std::vector<PrefixLastRestore> prefix_last_restore;  // reusers with a suffix, ascending

  bool has_sharing() const { return !reuse_specs.empty(); }
  bool is_reuser(int32_t row) const;
  Range q_range_for_batch(int32_t row) const;   // packed query slots of the row
  Range kv_range_for_batch(int32_t row) const;  // slots of the keys that the row sees
  // The row's restore entry, or null.
  const PrefixLastRestore* restore_for_reuse(int32_t row) const;
};

// Throws [sharing] if the detection is of another batch, a vector has another length than the batch
// or a prefix is negative or longer than its row.
SharingPlan make_sharing_plan(const std::vector<Sample>& rows,
                              const Detection& detection,
                              int64_t forward_id,
                              int64_t micro_batch_id);

// Kept parts of rows (ids, labels or masks alike).
template <typename T>
struct Trimmed {
  std::vector<std::vector<T>> rows;
  std::vector<T> flat;
  std::vector<int32_t> cu_seqlens;  // rows + 1
};

// Throws [sharing] if there are not as many ranges as rows or a range leaves its row.
void check_keep_ranges(const std::vector<int64_t>& lengths, const std::vector<Range>& keep);

template <typename T>
Trimmed<T> trim(const std::vector<std::vector<T>>& rows, const std::vector<Range>& keep) {
  std::vector<int64_t> lengths;
  for (const std::vector<T>& row : rows) lengths.push_back(static_cast<int64_t>(row.size()));
  check_keep_ranges(lengths, keep);
  Trimmed<T> out;
  out.cu_seqlens.push_back(0);
  for (size_t r = 0; r < rows.size(); ++r) {
    out.rows.emplace_back(rows[r].begin() + keep[r].begin, rows[r].begin() + keep[r].end);
    out.flat.insert(out.flat.end(), out.rows.back().begin(), out.rows.back().end());
    out.cu_seqlens.push_back(static_cast<int32_t>(out.flat.size()));
  }
  return out;
}

// Mask of the trimmed queries against the expanded keys, [sum of kept, sum of original] row-major,
// 1 = masked. A query of row r at position p sees keys 0..p of row r and nothing else. O(N^2), for
// tests and tools on small batches.
std::vector<uint8_t> block_mask(const SharingPlan& plan);

}  // namespace banyan::trie
