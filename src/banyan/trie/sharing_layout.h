// Packed slots of trimmed rows, each row padded to a multiple of `align` (specification B5,
// "Layout"), and the statistics that follow from it (B6, "audit"). banyan itself pads nothing but
// the end of a pack; this is the layout of the provider/reuser view, for its log lines and tools.
// Example: valid lengths 5, 2 at align 4 -> padded 8, 4; cu_seqlens 0 8 12; positions
// 0 1 2 3 4 0 0 0 0 1 0 0 (pads 0; prefix offsets are added to valid slots).
// Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/trie/sharing_view.h"

namespace banyan::trie {

struct PackedLayout {
  int32_t align_size = 1;
  std::vector<int32_t> valid_lengths;
  std::vector<int32_t> padded_lengths;
  std::vector<int32_t> cu_seqlens;           // running sum of the padded lengths, rows + 1
  int32_t max_seqlen = 0;                    // of the padded lengths
  std::vector<int32_t> packed_position_ids;  // [total_padded]
  std::vector<uint8_t> valid_token_mask;     // [total_padded]

  int32_t batch_size() const { return static_cast<int32_t>(valid_lengths.size()); }
  int32_t total_valid() const;
  int32_t total_padded() const { return cu_seqlens.back(); }
  bool has_pads() const { return total_valid() != total_padded(); }

  // Slot of token `index` of a row. Throws std::out_of_range (Python: IndexError) on a pad or
  // another row.
  int32_t packed_index(int32_t row, int32_t index) const;
  Range valid_slice(int32_t row) const;   // slots of the row's tokens
  Range padded_slice(int32_t row) const;  // with its pads
  // Slot of every valid token in order, [total_valid].
  std::vector<int32_t> valid_index() const;
};

// Rows are padded to: tp, or 2 tp cp where context parallelism cuts each row into 2 cp pieces.
// Throws [sharing] on a size below 1.
int32_t layout_alignment(int32_t tp_size, int32_t cp_size);

// `position_offsets` (one per row, or empty for 0) are added to the positions of valid slots.
// Throws [sharing] on align_size < 1, a negative length or another number of offsets.
PackedLayout make_packed_layout(const std::vector<int32_t>& valid_lengths,
                                int32_t align_size,
                                const std::vector<int32_t>& position_offsets = {});

// Throws [sharing] naming the first vector that contradicts the others.
void check_packed_layout(const PackedLayout& layout);

// Drops the pads of `packed`, `width` values per slot; the same values where there are no pads.
template <typename T>
std::vector<T> unpad(const std::vector<T>& packed, const PackedLayout& layout, int64_t width = 1) {
  BANYAN_CHECK(static_cast<int64_t>(packed.size()) == layout.total_padded() * width,
               "[sharing] packed length: wanted the padded total, ",
               layout.total_padded() * width,
               ", got ",
               packed.size());
  std::vector<T> out;
  for (const int32_t slot : layout.valid_index()) {
    out.insert(out.end(), packed.begin() + slot * width, packed.begin() + (slot + 1) * width);
  }
  return out;
}

// The inverse: pads become `fill`.
template <typename T>
std::vector<T> repad(const std::vector<T>& valid,
                     const PackedLayout& layout,
                     int64_t width = 1,
                     T fill = T()) {
  BANYAN_CHECK(static_cast<int64_t>(valid.size()) == layout.total_valid() * width,
               "[sharing] packed length: wanted the valid total, ",
               layout.total_valid() * width,
               ", got ",
               valid.size());
  std::vector<T> out(layout.total_padded() * width, fill);
  auto from = valid.begin();
  for (const int32_t slot : layout.valid_index()) {
    std::copy(from, from + width, out.begin() + slot * width);
    from += width;
  }
  return out;
}

// Slot of the provider's token whose log-probabilities a restore entry reads ("provider_1d_pos").
int32_t provider_slot(const SharingPlan& plan,
                      const PackedLayout& layout,
                      const PrefixLastRestore& restore);

// What sharing does to one pass, from plan and layout alone; a run compares it with what it
// measured.
struct SharingStatistics {
  int64_t forward_id = 0;
  int64_t micro_batch_id = 0;
  int64_t batch_size = 0;
  int64_t original_tokens = 0;
  int64_t kept_valid_tokens = 0;
  int64_t kept_padded_tokens = 0;
  int64_t reused_valid_tokens = 0;
  double reused_valid_token_ratio = 0.0;  // of the original tokens
  int64_t provider_count = 0;             // rows that reuse nothing, lone ones included
  int64_t reuser_count = 0;
  int64_t sharing_group_count = 0;
  int64_t expected_reused_counts_per_layer = 0;         // reusers
  int64_t expected_reused_prefix_tokens_per_layer = 0;  // sum of their prefixes
  int64_t expected_restore_count = 0;                   // reusers
};
SharingStatistics sharing_statistics(const SharingPlan& plan, const PackedLayout& layout);

}  // namespace banyan::trie
