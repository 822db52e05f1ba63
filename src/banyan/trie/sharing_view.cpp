#include "banyan/trie/sharing_view.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::trie {
namespace {

void check_detection(const std::vector<Sample>& rows, const Detection& detection) {
  const size_t size = rows.size();
  BANYAN_CHECK(static_cast<size_t>(detection.batch_size) == size,
               "[sharing] batch size: wanted that of the detection (",
               detection.batch_size,
               "), got ",
               size);
  const auto check_length = [&](const char* name, size_t length) {
    BANYAN_CHECK(
        length == size, "[sharing] ", name, ": wanted one per row, ", size, ", got ", length);
  };
  check_length("group_ids", detection.group_ids.size());
  check_length("provider_index", detection.provider_index.size());
  check_length("prefix_lens", detection.prefix_lens.size());
  check_length("is_provider", detection.is_provider.size());
  for (size_t row = 0; row < size; ++row) {
    const auto length = static_cast<int32_t>(rows[row].tokens.size());
    const int32_t prefix = detection.prefix_lens[row];
    BANYAN_CHECK(prefix >= 0 && prefix <= length,
                 "[sharing] prefix_len of row ",
                 row,
                 ": wanted 0 to the row's ",
                 length,
                 " tokens, got ",
                 prefix);
  }
}

std::vector<int32_t> running_sum(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> out = {0};
  for (const int32_t length : lengths) out.push_back(out.back() + length);
  return out;
}

int32_t largest(const std::vector<int32_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

}  // namespace

bool SharingPlan::is_reuser(int32_t row) const { return is_provider.at(row) == 0; }

Range SharingPlan::q_range_for_batch(int32_t row) const {
  return {cu_seqlens_q.at(row), cu_seqlens_q.at(row + 1)};
}

Range SharingPlan::kv_range_for_batch(int32_t row) const {
  return {cu_seqlens_kv.at(row), cu_seqlens_kv.at(row + 1)};
}

const PrefixLastRestore* SharingPlan::restore_for_reuse(int32_t row) const {
  for (const PrefixLastRestore& restore : prefix_last_restore) {
    if (restore.reuse_idx == row) return &restore;
  }
  return nullptr;
}

SharingPlan make_sharing_plan(const std::vector<Sample>& rows,
                              const Detection& detection,
                              int64_t forward_id,
                              int64_t micro_batch_id) {
  check_detection(rows, detection);
  SharingPlan plan;
  plan.forward_id = forward_id;
  plan.micro_batch_id = micro_batch_id;
  plan.batch_size = detection.batch_size;
  plan.reuse_specs = detection.reuse_specs;
  plan.num_groups = static_cast<int32_t>(detection.groups.size());
  plan.group_ids = detection.group_ids;
  plan.is_provider = detection.is_provider;
  plan.provider_index = detection.provider_index;
  plan.prefix_lens = detection.prefix_lens;
  for (size_t row = 0; row < rows.size(); ++row) {
    const auto length = static_cast<int32_t>(rows[row].tokens.size());
    const int32_t prefix = detection.prefix_lens[row];
    plan.original_lengths.push_back(length);
    plan.suffix_lens.push_back(length - prefix);
    plan.input_keep_ranges.push_back({prefix, length});
    if (prefix > 0 && prefix < length) {
      plan.prefix_last_restore.push_back({.reuse_idx = static_cast<int32_t>(row),
                                          .provider_idx = detection.provider_index[row],
                                          .group_id = detection.group_ids[row],
                                          .target_2d_pos = prefix - 1,
                                          .label_value = rows[row].tokens[prefix]});
    }
  }
  plan.kept_lengths_q = plan.suffix_lens;
  plan.expanded_lengths_kv = plan.original_lengths;
  plan.q_position_offsets = plan.prefix_lens;
  plan.kv_position_offsets.assign(rows.size(), 0);
  plan.label_keep_ranges = plan.input_keep_ranges;
  plan.loss_mask_keep_ranges = plan.input_keep_ranges;
  plan.cu_seqlens_q = running_sum(plan.kept_lengths_q);
  plan.cu_seqlens_kv = running_sum(plan.expanded_lengths_kv);
  plan.max_seqlen_q = largest(plan.kept_lengths_q);
  plan.max_seqlen_kv = largest(plan.expanded_lengths_kv);
  return plan;
}

void check_keep_ranges(const std::vector<int64_t>& lengths, const std::vector<Range>& keep) {
  BANYAN_CHECK(lengths.size() == keep.size(),
               "[sharing] keep ranges: wanted one per row, ",
               lengths.size(),
               ", got ",
               keep.size());
  for (size_t row = 0; row < lengths.size(); ++row) {
    const Range range = keep[row];
    BANYAN_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= lengths[row],
                 "[sharing] keep range of row ",
                 row,
                 ": wanted it inside the row's ",
                 lengths[row],
                 " tokens, got (",
                 range.begin,
                 ", ",
                 range.end,
                 ")");
  }
}

std::vector<uint8_t> block_mask(const SharingPlan& plan) {
  const int64_t columns = plan.cu_seqlens_kv.back();
  std::vector<uint8_t> mask(plan.cu_seqlens_q.back() * columns, 1);
  for (int32_t row = 0; row < plan.batch_size; ++row) {
    const Range queries = plan.q_range_for_batch(row);
    const int64_t first_key = plan.cu_seqlens_kv[row];
    for (int32_t q = queries.begin; q < queries.end; ++q) {
      const int32_t position = plan.q_position_offsets[row] + q - queries.begin;
      const auto seen = mask.begin() + q * columns + first_key;
      std::fill(seen, seen + position + 1, 0);
    }
  }
  return mask;
}

}  // namespace banyan::trie
