#include "banyan/train/sharing_log.h"

#include <iomanip>
#include <sstream>

#include "banyan/core/error.h"

namespace banyan::train {

using ::banyan::detail::concat;

ObserveLevel observe_level(const std::string& name) {
  if (name.empty() || name == "off") return ObserveLevel::kOff;
  if (name == "summary") return ObserveLevel::kSummary;
  if (name == "layer") return ObserveLevel::kLayer;
  if (name == "profile") return ObserveLevel::kProfile;
  BANYAN_CHECK(name == "debug",
               "[config] actor_rollout_ref.sharing.observe: wanted off, summary, layer, profile or "
               "debug, got '",
               name,
               "'");
  return ObserveLevel::kDebug;
}

namespace sharing_log {
namespace {

template <typename T, typename Print>
std::string listed(const std::vector<T>& values, Print print) {
  std::string out = "[";
  for (const T& value : values) {
    if (out.size() > 1) out += ", ";
    out += print(value);
  }
  return out += "]";
}

std::string fixed(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return out.str();
}

std::string known(const std::optional<int64_t>& rank) {
  return rank ? std::to_string(*rank) : "unknown";
}

std::string attention_fields(const RankInfo& rank, int64_t layer) {
  return concat(rank_fields(rank),
                "(sequence_parallel=",
                repr(rank.sequence_parallel),
                ") pp_rank=",
                rank.pp_rank,
                "/",
                rank.pp_size,
                " layer=",
                layer);
}

}  // namespace

std::string repr(bool value) { return value ? "True" : "False"; }

std::string repr(const std::vector<int32_t>& values) {
  return listed(values, [](int32_t value) { return std::to_string(value); });
}

std::string repr(const std::vector<std::string>& values) {
  return listed(values, [](const std::string& value) { return concat("'", value, "'"); });
}

std::string repr(const std::vector<trie::Range>& ranges) {
  return listed(ranges, [](const trie::Range& range) {
    return concat("(", range.begin, ", ", range.end, ")");
  });
}

std::string repr(const std::vector<trie::PrefixLastRestore>& restores) {
  return listed(restores, [](const trie::PrefixLastRestore& restore) {
    return concat("PrefixLastRestoreSpec(reuse_idx=",
                  restore.reuse_idx,
                  ", provider_idx=",
                  restore.provider_idx,
                  ", group_id=",
                  restore.group_id,
                  ", target_2d_pos=",
                  restore.target_2d_pos,
                  ", label_value=",
                  restore.label_value,
                  ")");
  });
}

std::string tuple(const Shape& shape) {
  std::string out = listed(shape, [](int64_t size) { return std::to_string(size); });
  out.front() = '(';
  out.back() = shape.size() == 1 ? ',' : ')';
  return shape.size() == 1 ? concat(out, ")") : out;
}

std::string torch_size(const Shape& shape) {
  return concat(
      "torch.Size(", listed(shape, [](int64_t size) { return std::to_string(size); }), ")");
}

std::string rank_fields(const RankInfo& rank) {
  return concat(
      "global_rank=", known(rank.global_rank), " tp_rank=", rank.tp_rank, "/", rank.tp_size);
}

std::string enter(int64_t batch_size, const std::vector<std::string>& batch_keys) {
  return concat("[PS][prepare] ENTER: batch_size=", batch_size, ", batch_keys=", repr(batch_keys));
}

std::string disabled() {
  return "[PS][prepare] PATH 1: prefix sharing disabled (config.enable_prefix_sharing=False), "
         "returning (batch, None)";
}

std::string enabled() {
  return "[PS][prepare] config.enable_prefix_sharing=True, validating config...";
}

std::vector<std::string> checks_passed(int64_t rows, int64_t longest) {
  const std::string shape = torch_size({rows, longest});
  return {"[PS][prepare] config.validate() returned OK",
          "[PS][prepare] checking megatron.use_remove_padding...",
          "[PS][prepare] use_remove_padding=True, about to batch.get(multi_modal_inputs)...",
          "[PS][prepare] multi_modal check PASSED (no real multi-modal content)",
          concat("[PS][prepare] tensor shapes: input_ids=",
                 shape,
                 ", attention_mask=",
                 shape,
                 ", position_ids=",
                 shape,
                 " (logical)")};
}

std::string sequences(const std::vector<int32_t>& lengths) {
  return concat("[PS][prepare] sequences: num_seq=", lengths.size(), ", seq_lens=", repr(lengths));
}

std::string plan_result(const trie::SharingPlan& plan) {
  return concat("[PS][prepare] prefix_sharing_plan result: has_sharing=",
                repr(plan.has_sharing()),
                ", keep_ranges=",
                repr(plan.input_keep_ranges),
                ", prefix_last_restore=",
                repr(plan.prefix_last_restore));
}

std::string no_sharing(const std::string& decision) {
  const std::string line = "[PS][prepare] PATH 5: no sharing detected, returning (batch, None)";
  return decision == "on" ? line : concat(line, " decision=", decision);
}

std::string sharing_detected() {
  return "[PS][prepare] PATH 6: sharing detected, preparing trimmed batch...";
}

std::string packed_layout(const RankInfo& rank, const trie::PackedLayout& layout) {
  return concat("[PS][prepare][",
                rank_fields(rank),
                " cp_rank=",
                rank.cp_rank,
                "/",
                rank.cp_size,
                " pp_rank=",
                rank.pp_rank,
                "/",
                rank.pp_size,
                " is_pp_first=",
                repr(rank.is_pp_first()),
                " is_pp_last=",
                repr(rank.is_pp_last()),
                "] packed_batch_layout: valid_lengths=",
                repr(layout.valid_lengths),
                ", padded_lengths=",
                repr(layout.padded_lengths),
                ", cu_seqlens=",
                repr(layout.cu_seqlens),
                ", max_seqlen=",
                layout.max_seqlen,
                ", total_valid=",
                layout.total_valid(),
                ", total_padded=",
                layout.total_padded());
}

std::string prepared(const trie::SharingPlan& plan) {
  return concat(
      "[PS][prepare] PATH 6 DONE: returning (trimmed_micro_batch, prefix_sharing_runtime_state) "
      "with keep_ranges=",
      repr(plan.input_keep_ranges));
}

std::string attention(const RankInfo& rank, const AttentionCall& call, int32_t align_size) {
  const trie::PackedLayout layout = trie::make_packed_layout(call.valid_lengths, align_size);
  return concat("[PS][attention][",
                attention_fields(rank, call.layer),
                "] enter prefix-sharing path: query_token_length=",
                call.query.at(0),
                " total_padded_length=",
                layout.total_padded(),
                " query_shape=",
                tuple(call.query),
                ", key_shape=",
                tuple(call.key),
                ", value_shape=",
                tuple(call.value),
                ", valid_lengths=",
                repr(layout.valid_lengths),
                ", padded_lengths=",
                repr(layout.padded_lengths),
                ", cu_seqlens=",
                repr(layout.cu_seqlens));
}

std::string expanded_kv(const RankInfo& rank, const AttentionCall& call) {
  const auto expanded = [&](Shape shape) {
    shape.at(0) = call.expanded_tokens;
    return tuple(shape);
  };
  return concat("[PS][attention][",
                attention_fields(rank, call.layer),
                "] built expanded kv: expanded_key_shape=",
                expanded(call.key),
                ", expanded_value_shape=",
                expanded(call.value),
                " (logical)");
}

std::string backend(const std::string& name, const AttentionCall& call) {
  return concat("[PS][backend] ",
                name,
                " attention: layer=",
                call.layer,
                ", q_shape=",
                tuple(call.query),
                ", k_shape=",
                tuple(call.key),
                ", v_shape=",
                tuple(call.value));
}

std::string audit_summary(const RankInfo& rank,
                          const trie::SharingStatistics& plan,
                          const Measured& measured) {
  const int64_t reused = plan.original_tokens - measured.kept_valid_tokens;
  const auto share = [](int64_t part, int64_t whole) {
    return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
  };
  return concat("[PS][audit][",
                rank_fields(rank),
                "] summary: forward_id=",
                plan.forward_id,
                " micro_batch_id=",
                plan.micro_batch_id,
                " batch_size=",
                plan.batch_size,
                " original_tokens=",
                plan.original_tokens,
                " kept_valid_tokens=",
                measured.kept_valid_tokens,
                " kept_padded_tokens=",
                measured.kept_padded_tokens,
                " reused_valid_tokens=",
                reused,
                " reused_valid_token_ratio=",
                fixed(share(reused, plan.original_tokens), 4),
                " provider_count=",
                plan.provider_count,
                " reuser_count=",
                plan.reuser_count,
                " sharing_group_count=",
                plan.sharing_group_count,
                " expected_reused_counts_per_layer=",
                plan.expected_reused_counts_per_layer,
                " expected_reused_prefix_tokens_per_layer=",
                plan.expected_reused_prefix_tokens_per_layer,
                " expected_restore_count=",
                plan.expected_restore_count,
                " actual_restore_count=",
                measured.actual_restore_count,
                " rho=",
                fixed(share(plan.original_tokens, measured.unique_tokens), 4),
                " t0=",
                plan.original_tokens,
                " t1=",
                measured.unique_tokens,
                " segments=",
                measured.segments,
                " forks=",
                measured.forks,
                " blocks=",
                measured.blocks,
                " open_tokens=",
                measured.open_tokens,
                " decision=",
                measured.decision);
}

std::string runtime_missing(const RankInfo& rank, const trie::SharingStatistics& plan) {
  return concat("[PS][audit][",
                rank_fields(rank),
                "] runtime_missing: expected_reused_counts_per_layer=",
                plan.expected_reused_counts_per_layer,
                " expected_reused_prefix_tokens_per_layer=",
                plan.expected_reused_prefix_tokens_per_layer);
}

bool LayerRecord::matches(const trie::SharingStatistics& plan) const {
  return reuse_miss_count == 0 && reuse_count == plan.expected_reused_counts_per_layer &&
         reused_prefix_tokens == plan.expected_reused_prefix_tokens_per_layer;
}

std::string audit_layer(const RankInfo& rank,
                        const LayerRecord& record,
                        const trie::SharingStatistics& plan) {
  std::string line = concat("[PS][audit][",
                            rank_fields(rank),
                            " layer=",
                            record.layer,
                            "] runtime: store_count=",
                            record.store_count,
                            " reuse_count=",
                            record.reuse_count,
                            " reuse_hit_count=",
                            record.reuse_hit_count,
                            " reuse_miss_count=",
                            record.reuse_miss_count,
                            " stored_tokens=",
                            record.stored_tokens,
                            " reused_prefix_tokens=",
                            record.reused_prefix_tokens,
                            " expanded_kv_tokens=",
                            record.expanded_kv_tokens,
                            " valid_q_tokens=",
                            record.valid_q_tokens,
                            " padded_q_tokens=",
                            record.padded_q_tokens,
                            " matches_expected=",
                            repr(record.matches(plan)),
                            " (expanded_kv_tokens logical)");
  if (record.recomputed_q_tokens > 0)
    line += concat(" recomputed_q_tokens=", record.recomputed_q_tokens);
  return line;
}

std::string profile_layer(const RankInfo& rank, const LayerRecord& record) {
  return concat("[PS][profile][",
                rank_fields(rank),
                " layer=",
                record.layer,
                "] attention: forward_ms=",
                fixed(record.forward_seconds * 1e3, 3),
                " backward_ms=",
                fixed(record.backward_seconds * 1e3, 3));
}

std::string restored(int64_t rows, int64_t longest, int64_t reusers_with_suffix) {
  return concat("[PS][restore_verl080] unfolded B=",
                rows,
                " L_max=",
                longest,
                ", restored reusers=",
                reusers_with_suffix,
                " (prefix-last entries; interior handled by bulk slice) (logical)");
}

std::string trimming(int64_t expected_total,
                     int64_t actual_total,
                     const std::vector<int32_t>& prompt_lens,
                     const std::vector<int32_t>& trimmed_prompt_lens,
                     const std::vector<int32_t>& response_lens) {
  return concat("[PS][nopadding] trimming detected: expected_total=",
                expected_total,
                " actual_total=",
                actual_total,
                " original_prompt_lens=",
                repr(prompt_lens),
                " trimmed_prompt_lens=",
                repr(trimmed_prompt_lens),
                " response_lens=",
                repr(response_lens));
}

std::string forward_step(const RankInfo& rank,
                         const std::string& event,
                         const std::vector<std::pair<std::string, std::string>>& values) {
  std::string line = concat("[PS][forward_step][",
                            rank_fields(rank),
                            " pp_rank=",
                            rank.pp_rank,
                            "/",
                            rank.pp_size,
                            " cp_rank=",
                            rank.cp_rank,
                            "/",
                            rank.cp_size,
                            "] ",
                            event);
  for (const auto& [key, value] : values) line += " " + key + "=" + value;
  return line;
}

}  // namespace sharing_log
}  // namespace banyan::train
