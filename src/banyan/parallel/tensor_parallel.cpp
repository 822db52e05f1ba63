#include "banyan/parallel/tensor_parallel.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

constexpr const char* kSize = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size";

bool is_one_of(const std::string& name, std::initializer_list<std::string_view> ends) {
  return std::any_of(
      ends.begin(), ends.end(), [&](std::string_view end) { return name.ends_with(end); });
}

bool is_kv_projection(const std::string& name) {
  return is_one_of(name,
                   {"self_attn.k_proj.weight",
                    "self_attn.k_proj.bias",
                    "self_attn.v_proj.weight",
                    "self_attn.v_proj.bias"});
}

bool is_expert(const std::string& name) { return name.find(".mlp.experts.") != std::string::npos; }

void check_enough(const char* what, int64_t have, int64_t ranks) {
  BANYAN_CHECK(
      have >= ranks, "[config] ", kSize, ": wanted at most ", what, " (", have, "), got ", ranks);
}

// Rows [rows, E] with zeros behind them.
at::Tensor padded(const at::Tensor& x, int64_t rows) {
  if (x.size(0) == rows) return x;
  return at::constant_pad_nd(x, {0, 0, 0, rows - x.size(0)});
}

}  // namespace

Part even_part(int64_t whole, int64_t size, int64_t rank) {
  const int64_t least = whole / size;
  const int64_t longer = whole % size;
  return {rank * least + std::min(rank, longer), least + (rank < longer ? 1 : 0)};
}

void check_cut(const DecoderSizes& whole, int64_t num_ranks) {
  check_enough("intermediate_size", whole.intermediate, num_ranks);
  check_enough("vocab_size", whole.vocab, num_ranks);
  if (whole.expert_intermediate > 0) {
    check_enough("moe_intermediate_size", whole.expert_intermediate, num_ranks);
  }
  if (whole.kv_heads >= num_ranks) return;
  check_enough("num_attention_heads", whole.heads, num_ranks);
  BANYAN_CHECK(num_ranks % whole.kv_heads == 0,
               "[config] ",
               kSize,
               ": wanted a multiple of num_key_value_heads (",
               whole.kv_heads,
               ") or at most that many, got ",
               num_ranks);
}

TensorParallel::TensorParallel(Collectives& ranks,
                               bool sequence_parallel,
                               const DecoderSizes& whole)
    : ranks_(&ranks), sequence_(sequence_parallel), whole_(whole) {
  check_cut(whole, ranks.size());
  const int64_t size = ranks.size();
  const int64_t queries = whole.heads / whole.kv_heads;  // per kv head
  if (shares_kv_heads()) {
    const int64_t copies = size / whole.kv_heads;
    kv_heads_ = {ranks.rank() / copies, 1};
    heads_ = even_part(queries, copies, ranks.rank() % copies);
    heads_.begin += kv_heads_.begin * queries;
  } else {
    kv_heads_ = even_part(whole.kv_heads, size, ranks.rank());
    heads_ = {kv_heads_.begin * queries, kv_heads_.count * queries};
  }
  intermediate_ = even_part(whole.intermediate, size, ranks.rank());
  expert_intermediate_ = even_part(whole.expert_intermediate, size, ranks.rank());
  vocab_ = even_part(whole.vocab, size, ranks.rank());
}

Cut TensorParallel::cut_of(const std::string& name) const {
  const int64_t d = whole_.head_dim;
  if (is_one_of(name, {"self_attn.q_proj.weight", "self_attn.q_proj.bias"})) {
    return {0, heads_.begin * d, whole_.heads * d};
  }
  if (is_kv_projection(name)) return {0, kv_heads_.begin * d, whole_.kv_heads * d};
  if (is_one_of(name, {"self_attn.o_proj.weight"})) {
    return {1, heads_.begin * d, whole_.heads * d};
  }
  const Part& run = is_expert(name) ? expert_intermediate_ : intermediate_;
  const int64_t width = is_expert(name) ? whole_.expert_intermediate : whole_.intermediate;
  if (is_one_of(name,
                {".gate_proj.weight", ".gate_proj.bias", ".up_proj.weight", ".up_proj.bias"})) {
    return {0, run.begin, width};
  }
  if (is_one_of(name, {".down_proj.weight"})) return {1, run.begin, width};
  if (is_one_of(name, {"model.embed_tokens.weight", "lm_head.weight"})) {
    return {0, vocab_.begin, whole_.vocab};
  }
  return {};
}

bool TensorParallel::is_partial(const std::string& name) const {
  if (is_one_of(name, {"self_attn.q_norm.weight", "self_attn.k_norm.weight"})) return true;
  return sequence_ && is_one_of(name, {"layernorm.weight", "model.norm.weight"});
}

void TensorParallel::declare(ParamTable& table) const {
  const int64_t copies = shares_kv_heads() ? ranks_->size() / whole_.kv_heads : 1;
  for (Param& param : table.params()) {
    if (whole_.expert_intermediate == 0 && is_expert(param.name)) continue;
    param.cut = cut_of(param.name);
    if (param.cut.is_whole()) {
      param.is_copy = !ranks_->is_first();
    } else if (is_kv_projection(param.name)) {
      param.is_copy = ranks_->rank() % copies != 0;
    }
  }
  table.on_finish_grads([this, &table] { finish(table); });
}

at::Tensor TensorParallel::sum_rows(at::Tensor term) const {
  if (!sequence_) {
    term = term.contiguous();
    ranks_->all_reduce_sum(term);
    return term;
  }
  const int64_t own = longest_run(term.size(0));
  const at::Tensor all = padded(term, own * ranks_->size()).contiguous();
  const at::Tensor sum = ranks_->reduce_scatter_sum(all.view({-1}));
  return sum.to(term.scalar_type()).view({own, term.size(1)});
}

at::Tensor TensorParallel::gather_rows(const at::Tensor& x, int64_t rows) const {
  if (!sequence_) return x;
  const at::Tensor all = ranks_->all_gather(x).view({-1, x.size(1)});
  return rows < 0 ? all : all.narrow(0, 0, rows);
}

at::Tensor TensorParallel::own_rows(const at::Tensor& x) const {
  if (!sequence_) return x;
  const Part run = run_of(x.size(0));
  return padded(x.narrow(0, run.begin, run.count), longest_run(x.size(0))).contiguous();
}

int64_t TensorParallel::longest_run(int64_t rows) const {
  return (rows + ranks_->size() - 1) / ranks_->size();
}

Part TensorParallel::run_of(int64_t rows) const {
  const int64_t longest = longest_run(rows);
  const int64_t begin = std::min(rows, longest * ranks_->rank());
  return {begin, std::min(longest, rows - begin)};
}

at::Tensor TensorParallel::gather_runs(const at::Tensor& run, int64_t rows) const {
  const at::Tensor all = ranks_->all_gather(padded(run, longest_run(rows)));
  return all.view({-1, run.size(1)}).narrow(0, 0, rows);
}

at::Tensor TensorParallel::rows_from_runs(const at::Tensor& run, int64_t rows) const {
  return sequence_ ? padded(run, longest_run(rows)) : gather_runs(run, rows);
}

TensorParallel::OwnTokens TensorParallel::own_tokens(const at::Tensor& ids) const {
  if (ids.is_cpu() && ids.numel() > 0) {
    const int64_t highest = ids.max().item<int64_t>();
    const int64_t lowest = ids.min().item<int64_t>();
    BANYAN_CHECK(lowest >= 0 && highest < whole_.vocab,
                 "[embedding] ids: wanted ids in [0, ",
                 whole_.vocab,
                 "), got ",
                 lowest < 0 ? lowest : highest);
  }
  const at::Tensor local = ids.sub(vocab_.begin);
  const at::Tensor is_here = at::logical_and(local.ge(0), local.lt(vocab_.count));
  return {local.mul(is_here), is_here};
}

// Several ranks have a part of the gradient of the same rows: added at their place in the whole.
void TensorParallel::sum_copies(Param& param) const {
  at::Tensor whole = at::zeros(param.cut.whole_shape(param.grad.sizes()), param.grad.options());
  at::Tensor own = param.cut.part_of(whole, param.grad.size(0));
  own.copy_(param.grad);
  ranks_->all_reduce_sum(whole);
  param.grad.copy_(own);
}

void TensorParallel::finish(ParamTable& table) const {
  std::vector<at::Tensor> parts;
  for (Param& param : table.params()) {
    if (shares_kv_heads() && is_kv_projection(param.name)) sum_copies(param);
    if (is_partial(param.name)) parts.push_back(param.grad);
  }
  if (parts.empty()) return;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& part : parts) flat.push_back(part.view({-1}));
  at::Tensor sum = at::cat(flat);
  ranks_->all_reduce_sum(sum);
  int64_t begin = 0;
  for (at::Tensor& part : parts) {
    part.view({-1}).copy_(sum.narrow(0, begin, part.numel()));
    begin += part.numel();
  }
}

}  // namespace banyan::parallel
