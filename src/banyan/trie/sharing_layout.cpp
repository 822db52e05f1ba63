#include "banyan/trie/sharing_layout.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace banyan::trie {

int32_t PackedLayout::total_valid() const {
  return std::accumulate(valid_lengths.begin(), valid_lengths.end(), 0);
}

int32_t PackedLayout::packed_index(int32_t row, int32_t index) const {
  const bool is_row = row >= 0 && row < batch_size();
  if (!is_row || index < 0 || index >= valid_lengths[row]) {
    throw std::out_of_range(::banyan::detail::concat(
        "[sharing] packed_index: wanted a token of row ",
        row,
        is_row ? ::banyan::detail::concat(" (", valid_lengths[row], " valid)")
               : ::banyan::detail::concat(" of ", batch_size(), " rows"),
        ", got ",
        index));
  }
  return cu_seqlens[row] + index;
}

Range PackedLayout::valid_slice(int32_t row) const {
  return {cu_seqlens.at(row), cu_seqlens.at(row) + valid_lengths.at(row)};
}

Range PackedLayout::padded_slice(int32_t row) const {
  return {cu_seqlens.at(row), cu_seqlens.at(row + 1)};
}

std::vector<int32_t> PackedLayout::valid_index() const {
  std::vector<int32_t> out;
  for (int32_t row = 0; row < batch_size(); ++row) {
    for (int32_t i = 0; i < valid_lengths[row]; ++i) out.push_back(cu_seqlens[row] + i);
  }
  return out;
}

int32_t layout_alignment(int32_t tp_size, int32_t cp_size) {
  BANYAN_CHECK(tp_size >= 1 && cp_size >= 1,
               "[sharing] parallel sizes: wanted >= 1, got tp_size=",
               tp_size,
               " cp_size=",
               cp_size);
  return cp_size > 1 ? 2 * tp_size * cp_size : tp_size;
}

PackedLayout make_packed_layout(const std::vector<int32_t>& valid_lengths,
                                int32_t align_size,
                                const std::vector<int32_t>& position_offsets) {
  BANYAN_CHECK(align_size >= 1, "[sharing] align_size: wanted >= 1, got ", align_size);
  BANYAN_CHECK(position_offsets.empty() || position_offsets.size() == valid_lengths.size(),
               "[sharing] position_offsets: wanted one per row, ",
               valid_lengths.size(),
               ", got ",
               position_offsets.size());
  PackedLayout layout;
  layout.align_size = align_size;
  layout.valid_lengths = valid_lengths;
  layout.cu_seqlens = {0};
  for (size_t row = 0; row < valid_lengths.size(); ++row) {
    const int32_t valid = valid_lengths[row];
    BANYAN_CHECK(valid >= 0, "[sharing] valid length of row ", row, ": wanted >= 0, got ", valid);
    const int32_t padded = (valid + align_size - 1) / align_size * align_size;
    layout.padded_lengths.push_back(padded);
    layout.cu_seqlens.push_back(layout.cu_seqlens.back() + padded);
    layout.max_seqlen = std::max(layout.max_seqlen, padded);
    const int32_t offset = position_offsets.empty() ? 0 : position_offsets[row];
    for (int32_t i = 0; i < padded; ++i) {
      layout.packed_position_ids.push_back(i < valid ? offset + i : 0);
      layout.valid_token_mask.push_back(i < valid ? 1 : 0);
    }
  }
  return layout;
}

void check_packed_layout(const PackedLayout& layout) {
  const auto check = [](bool fits, const char* name, const char* wanted) {
    BANYAN_CHECK(fits, "[sharing] layout ", name, ": wanted ", wanted);
  };
  const size_t rows = layout.valid_lengths.size();
  check(layout.align_size >= 1, "align_size", ">= 1");
  check(layout.padded_lengths.size() == rows, "padded_lengths", "one per row");
  check(layout.cu_seqlens.size() == rows + 1, "cu_seqlens", "one more than rows");
  check(layout.cu_seqlens.front() == 0, "cu_seqlens", "a first entry of 0");
  int32_t longest = 0;
  for (size_t row = 0; row < rows; ++row) {
    const int32_t valid = layout.valid_lengths[row];
    const int32_t padded = layout.padded_lengths[row];
    check(valid >= 0, "valid_lengths", "no negative length");
    check(padded >= valid && padded % layout.align_size == 0,
          "padded_lengths",
          "multiples of align_size, not below the valid lengths");
    check(layout.cu_seqlens[row + 1] - layout.cu_seqlens[row] == padded,
          "cu_seqlens",
          "the running sum of the padded lengths");
    longest = std::max(longest, padded);
  }
  const auto total = static_cast<size_t>(layout.total_padded());
  check(layout.max_seqlen == longest, "max_seqlen", "the longest padded length");
  check(layout.packed_position_ids.size() == total, "packed_position_ids", "one per slot");
  check(layout.valid_token_mask.size() == total, "valid_token_mask", "one per slot");
  const auto marked =
      std::count(layout.valid_token_mask.begin(), layout.valid_token_mask.end(), uint8_t{1});
  check(marked == layout.total_valid(), "valid_token_mask", "a mark for every valid token");
}

int32_t provider_slot(const SharingPlan& plan,
                      const PackedLayout& layout,
                      const PrefixLastRestore& restore) {
  const int32_t provider = restore.provider_idx;
  return layout.packed_index(provider, restore.target_2d_pos - plan.prefix_lens.at(provider));
}

SharingStatistics sharing_statistics(const SharingPlan& plan, const PackedLayout& layout) {
  BANYAN_CHECK(layout.valid_lengths == plan.kept_lengths_q,
               "[sharing] layout: wanted the kept lengths of the plan as its valid lengths");
  SharingStatistics out;
  out.forward_id = plan.forward_id;
  out.micro_batch_id = plan.micro_batch_id;
  out.batch_size = plan.batch_size;
  out.original_tokens = plan.cu_seqlens_kv.back();
  out.kept_valid_tokens = layout.total_valid();
  out.kept_padded_tokens = layout.total_padded();
  out.reused_valid_tokens = out.original_tokens - out.kept_valid_tokens;
  if (out.original_tokens > 0) {
    out.reused_valid_token_ratio =
        static_cast<double>(out.reused_valid_tokens) / static_cast<double>(out.original_tokens);
  }
  out.reuser_count = static_cast<int64_t>(plan.reuse_specs.size());
  out.provider_count = out.batch_size - out.reuser_count;
  out.sharing_group_count = plan.num_groups;
  out.expected_reused_counts_per_layer = out.reuser_count;
  for (const ReuseSpec& spec : plan.reuse_specs) {
    out.expected_reused_prefix_tokens_per_layer += spec.prefix_len;
  }
  out.expected_restore_count = out.reuser_count;
  return out;
}

}  // namespace banyan::trie
