// Dispatch of trie attention: the native kernels on tiles (forward) and chunks (backward) of the
// trie, or plain LibTorch operators (detail/trie_attention_aten.h). Keys and values of carried
// tokens are read where their block left them.
#include "banyan/ops/trie_attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <optional>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/attention_backward.h"
#include "banyan/kernels/cpu/scratch.h"
#include "banyan/kernels/cpu/work_items.h"
#include "banyan/ops/detail/attention_check.h"
#include "banyan/ops/detail/carried_rows.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/detail/token_rows.h"
#include "banyan/ops/detail/trie_attention_aten.h"
#include "banyan/ops/detail/trie_index.h"
#include "banyan/ops/slots.h"

namespace banyan::ops {

static_assert(kPathTile == kernels::kTileTokens);

struct TrieAttention::Index {
  explicit Index(const trie::Trie& of) : trie(of) {}
  const trie::Trie& trie;
  std::optional<detail::TrieTiles> tiles;    // native, from the first forward
  std::optional<detail::TrieChunks> chunks;  // native, from the first backward
  int64_t num_pairs = -1;                    // of the own tokens, once a profile asks
};

struct AttentionMemory {
  kernels::Scratch tiles;
  kernels::Scratch sums;
};

std::shared_ptr<AttentionMemory> make_attention_memory() {
  return std::make_shared<AttentionMemory>();
}

namespace {

using detail::bf16_bits;

// Packs the keys and values of every tile: [tiles, K, tile_elements(D)].
const uint16_t* pack_tiles(const detail::TrieTiles& tiles,
                           const detail::Rows<const uint16_t>& keys,
                           const detail::Rows<const uint16_t>& values,
                           const kernels::AttentionShape& shape,
                           kernels::Scratch& memory) {
  const int64_t kv_heads = shape.num_kv_heads;
  const int64_t dim = shape.head_dim;
  const int64_t size = kernels::tile_elements(dim);
  uint16_t* packed = memory.get<uint16_t>(tiles.num_tiles() * kv_heads * size);
  kernels::for_each_item(tiles.num_tiles(), [&](const auto& next) {
    const uint16_t* rows[kernels::kTileTokens];
    for (int64_t tile = next(); tile >= 0; tile = next()) {
      const int32_t* tokens = tiles.tokens.data() + tiles.token_offsets[tile];
      const int64_t n = tiles.token_offsets[tile + 1] - tiles.token_offsets[tile];
      for (int64_t head = 0; head < kv_heads; ++head) {
        uint16_t* out = packed + (tile * kv_heads + head) * size;
        for (int64_t i = 0; i < n; ++i) rows[i] = keys.data()[tokens[i]] + head * dim;
        kernels::pack_columns(rows, n, kernels::kTileTokens, dim, out);
        for (int64_t i = 0; i < n; ++i) rows[i] = values.data()[tokens[i]] + head * dim;
        kernels::pack_pairs(rows, n, kernels::kTileTokens, dim, out + kernels::kTileTokens * dim);
      }
    }
  });
  return packed;
}

}  // namespace

TrieAttention::TrieAttention(const trie::Trie& trie,
                             const ComputeOptions& options,
                             BlockCarry carry,
                             std::shared_ptr<AttentionMemory> memory)
    : index_(std::make_unique<Index>(trie)),
      options_(options),
      carry_(std::move(carry)),
      memory_(memory != nullptr ? std::move(memory) : make_attention_memory()) {
  check_carry(trie, carry_);
}

TrieAttention::~TrieAttention() = default;

void TrieAttention::check_inputs(int64_t layer,
                                 const at::Tensor& q,
                                 const at::Tensor& k,
                                 const at::Tensor& v) const {
  const int64_t num_own = index_->trie.num_tokens() - carry_.num_carried;
  detail::check_attention_inputs("trie_attention", num_own, q, k, v, options_);
  for (const CarrySource& source : carry_.sources) {
    BANYAN_CHECK(source.store->has(layer) && source.store->k[layer].size(0) >= source.count &&
                     source.store->k[layer].size(1) == k.size(1) &&
                     source.store->k[layer].size(2) == k.size(2) &&
                     source.store->k[layer].scalar_type() == k.scalar_type(),
                 "[trie_attention] carried keys of layer ",
                 layer,
                 ": wanted ",
                 source.count,
                 " rows like k ",
                 k.sizes(),
                 " of a block whose forward came first");
  }
}

// Per pair, query head and dimension: scores and sums forward, dV, dP, dQ and dK backward, where
// the scores are computed again. Bytes: q, out and lse of every query, every key and value once.
profile::Work TrieAttention::work(const at::Tensor& q, const at::Tensor& k, bool backward) const {
  if (index_->num_pairs < 0) {
    for (int64_t t = carry_.num_carried, end = index_->trie.num_tokens(); t < end; ++t) {
      index_->num_pairs += index_->trie.dep[t] + 1;
    }
    ++index_->num_pairs;
  }
  const int64_t product = 2 * index_->num_pairs * q.size(1) * q.size(2);
  const auto queries = static_cast<int64_t>(q.nbytes());
  const int64_t keys = 2 * index_->trie.num_tokens() * k.size(1) * k.size(2) * k.element_size();
  return {.flops = (backward ? 4 : 2) * product,
          .repeated = backward ? product : 0,
          .bytes = backward ? 4 * queries + 2 * keys : 2 * queries + keys};
}

// What a changed op is given. The original computes as without a slot; if a wrapper hands it other
// keys or values, with plain operators over all of them, carried ones too.
AttentionCall TrieAttention::call_of(
    int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  AttentionCall call{.layer = layer,
                     .q = q.contiguous(),
                     .k = detail::with_carried(carry_, &CarryStore::k, layer, k).contiguous(),
                     .v = detail::with_carried(carry_, &CarryStore::v, layer, v).contiguous(),
                     .parent = at::tensor(index_->trie.par, at::kInt),
                     .scale = scale};
  const auto has_keys = [all_k = call.k, all_v = call.v](const AttentionCall& of) {
    return of.k.is_same(all_k) && of.v.is_same(all_v);
  };
  call.own_forward = [this, has_keys, k, v](const AttentionCall& of) {
    AttentionResult result;
    if (has_keys(of)) {
      result.out = own_forward(of.layer, of.q, k, v, of.scale, &result.lse);
    } else {
      detail::DenseAttention dense =
          detail::trie_attention_aten(index_->trie, carry_.num_carried, of.q, of.k, of.v, of.scale);
      result = {std::move(dense.out), std::move(dense.lse)};
    }
    return result;
  };
  call.own_backward = [this, has_keys, k, v](const AttentionCall& of,
                                             const at::Tensor& grad_out,
                                             const at::Tensor& out,
                                             const at::Tensor& lse) {
    if (has_keys(of)) {
      AttentionGradients own = own_backward(of.layer, grad_out, of.q, k, v, out, lse, of.scale);
      return AttentionSlotGradients{own.dq, own.dk, own.dv, /*is_settled=*/true};
    }
    detail::DenseAttentionGradients dense = detail::trie_attention_aten_backward(
        index_->trie, carry_.num_carried, grad_out, of.q, of.k, of.v, out, lse, of.scale);
    return AttentionSlotGradients{dense.dq, dense.dk, dense.dv};
  };
  return call;
}

at::Tensor TrieAttention::multiplicity() const {
  const trie::Trie& trie = index_->trie;
  at::Tensor out = at::empty({trie.num_tokens() - carry_.num_carried}, at::kDouble);
  double* to = out.data_ptr<double>();
  for (int32_t t = carry_.num_carried; t < trie.num_tokens(); ++t) {
    *to++ = trie.segments[trie.seg[t]].num_samples;
  }
  return out;
}

at::Tensor TrieAttention::forward(int64_t layer,
                                  const at::Tensor& q,
                                  const at::Tensor& k,
                                  const at::Tensor& v,
                                  double scale,
                                  at::Tensor* lse) {
  const profile::Scope timed("attention", [&] { return work(q, k, /*backward=*/false); });
  check_inputs(layer, q, k, v);
  if (!carry_.offered.empty()) detail::offer(carry_, layer, k, v);
  const auto op = attention_slot().changed();
  if (!op) [[likely]]
    return own_forward(layer, q, k, v, scale, lse);
  AttentionResult result = op->forward(call_of(layer, q, k, v, scale));
  if (lse != nullptr) *lse = std::move(result.lse);
  return slot_result(attention_slot(), "out", result.out, q.sizes(), q);
}

at::Tensor TrieAttention::own_forward(int64_t layer,
                                      const at::Tensor& q,
                                      const at::Tensor& k,
                                      const at::Tensor& v,
                                      double scale,
                                      at::Tensor* lse) {
  if (!is_native(options_)) {
    detail::DenseAttention dense =
        detail::trie_attention_aten(index_->trie,
                                    carry_.num_carried,
                                    q,
                                    detail::with_carried(carry_, &CarryStore::k, layer, k),
                                    detail::with_carried(carry_, &CarryStore::v, layer, v),
                                    scale);
    if (lse != nullptr) *lse = std::move(dense.lse);
    return dense.out;
  }

  if (!index_->tiles) index_->tiles = detail::build_tiles(index_->trie, carry_.num_carried);
  const at::Tensor queries = detail::token_rows(q);
  const at::Tensor keys = detail::token_rows(k);
  const at::Tensor values = detail::token_rows(v);
  at::Tensor out = at::empty(q.sizes(), q.options());
  if (lse != nullptr) {
    *lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  }
  kernels::AttendInput input;
  input.shape = detail::attention_shape(q, k, scale);
  input.num_tokens = q.size(0);
  input.q = bf16_bits(queries);
  input.q_stride = queries.stride(0);
  input.tiles = pack_tiles(*index_->tiles,
                           detail::key_rows(carry_, &CarryStore::k, layer, keys),
                           detail::key_rows(carry_, &CarryStore::v, layer, values),
                           input.shape,
                           memory_->tiles);
  input.tile_lists = index_->tiles->tile_list.data() + carry_.num_carried;
  input.visible = index_->tiles->visible.data() + carry_.num_carried;
  kernels::attend(input, bf16_bits(out), lse == nullptr ? nullptr : lse->data_ptr<float>());
  return out;
}

AttentionGradients TrieAttention::backward(int64_t layer,
                                           const at::Tensor& grad_out,
                                           const at::Tensor& q,
                                           const at::Tensor& k,
                                           const at::Tensor& v,
                                           const at::Tensor& out,
                                           const at::Tensor& lse,
                                           double scale) {
  const profile::Scope timed("attention backward", [&] { return work(q, k, /*backward=*/true); });
  check_inputs(layer, q, k, v);
  BANYAN_CHECK(grad_out.sizes() == q.sizes() && out.sizes() == q.sizes() &&
                   grad_out.scalar_type() == q.scalar_type() &&
                   out.scalar_type() == q.scalar_type(),
               "[trie_attention] grad_out, out: wanted q's shape and dtype ",
               q.sizes(),
               ", got ",
               grad_out.sizes(),
               " and ",
               out.sizes());
  for (const CarrySource& source : carry_.sources) source.store->ensure_gradient(layer);
  const auto op = attention_slot().changed();
  if (!op) [[likely]]
    return own_backward(layer, grad_out, q, k, v, out, lse, scale);
  const AttentionCall call = call_of(layer, q, k, v, scale);
  AttentionSlotGradients grads = op->backward(call, grad_out, out, lse);
  const auto checked = [](const char* what, const at::Tensor& got, const at::Tensor& like) {
    return slot_result(attention_slot(), what, got, like.sizes(), like);
  };
  grads.dq = checked("dq", grads.dq, q);
  if (grads.is_settled) return {grads.dq, checked("dk", grads.dk, k), checked("dv", grads.dv, v)};
  const auto part = [&](const char* what,
                        const at::Tensor& all,
                        const at::Tensor& of,
                        std::vector<at::Tensor> CarryStore::* sums) {
    // In the accumulate type or in that of the keys; a copy, so that what the op returned stays.
    const at::ScalarType wide = detail::accumulate_type(of.scalar_type());
    const at::Tensor own =
        all.defined() ? all.to(wide, /*non_blocking=*/false, /*copy=*/true) : all;
    return detail::settle(carry_, sums, layer, checked(what, own, of.to(wide)), of.scalar_type());
  };
  return {grads.dq,
          part("dk", grads.dk, call.k, &CarryStore::dk),
          part("dv", grads.dv, call.v, &CarryStore::dv)};
}

AttentionGradients TrieAttention::own_backward(int64_t layer,
                                               const at::Tensor& grad_out,
                                               const at::Tensor& q,
                                               const at::Tensor& k,
                                               const at::Tensor& v,
                                               const at::Tensor& out,
                                               const at::Tensor& lse,
                                               double scale) {
  BANYAN_CHECK(lse.defined() && lse.dim() == 2 && lse.size(0) == q.size(0) &&
                   lse.size(1) == q.size(1) &&
                   lse.scalar_type() == detail::accumulate_type(q.scalar_type()),
               "[trie_attention] lse: wanted what forward wrote, [",
               q.size(0),
               ", ",
               q.size(1),
               "], got ",
               lse.defined() ? lse.sizes() : at::IntArrayRef());
  if (!is_native(options_)) {
    const detail::DenseAttentionGradients dense =
        detail::trie_attention_aten_backward(index_->trie,
                                             carry_.num_carried,
                                             grad_out,
                                             q,
                                             detail::with_carried(carry_, &CarryStore::k, layer, k),
                                             detail::with_carried(carry_, &CarryStore::v, layer, v),
                                             out,
                                             lse,
                                             scale);
    return {dense.dq,
            detail::settle(carry_, &CarryStore::dk, layer, dense.dk, k.scalar_type()),
            detail::settle(carry_, &CarryStore::dv, layer, dense.dv, v.scalar_type())};
  }
  return backward_native(layer, grad_out, q, k, v, out, lse, scale);
}

AttentionGradients TrieAttention::backward_native(int64_t layer,
                                                  const at::Tensor& grad_out,
                                                  const at::Tensor& q,
                                                  const at::Tensor& k,
                                                  const at::Tensor& v,
                                                  const at::Tensor& out,
                                                  const at::Tensor& lse,
                                                  double scale) {
  if (!index_->chunks) index_->chunks = detail::build_chunks(index_->trie, carry_.num_carried);
  const at::Tensor queries = detail::token_rows(q);
  const at::Tensor keys = detail::token_rows(k);
  const at::Tensor values = detail::token_rows(v);
  const at::Tensor outputs = out.contiguous();
  const at::Tensor grads = grad_out.contiguous();
  const at::Tensor row_lse = lse.contiguous();
  AttentionGradients result{at::empty(q.sizes(), q.options()),
                            at::empty(k.sizes(), k.options()),
                            at::empty(v.sizes(), v.options())};

  const detail::Rows<const uint16_t> k_rows = detail::key_rows(carry_, &CarryStore::k, layer, keys);
  const detail::Rows<const uint16_t> v_rows =
      detail::key_rows(carry_, &CarryStore::v, layer, values);
  const detail::Rows<float> dk_sums = detail::sum_rows(carry_, &CarryStore::dk, layer, k.size(0));
  const detail::Rows<float> dv_sums = detail::sum_rows(carry_, &CarryStore::dv, layer, v.size(0));
  kernels::AttendBackwardInput input;
  input.shape = detail::attention_shape(q, k, scale);
  input.num_carried = carry_.num_carried;
  input.q = bf16_bits(queries);
  input.q_stride = queries.stride(0);
  input.out = bf16_bits(outputs);
  input.grad_out = bf16_bits(grads);
  input.lse = row_lse.data_ptr<float>();
  input.k = k_rows.data();
  input.v = v_rows.data();
  input.chunks = index_->chunks->chunks.data();
  input.num_chunks = static_cast<int64_t>(index_->chunks->chunks.size());
  input.first_own = index_->chunks->first_own;
  input.runs = index_->chunks->runs.data();
  input.num_runs = static_cast<int64_t>(index_->chunks->runs.size());
  input.turns = index_->chunks->turns.data();
  input.tile_begins = index_->chunks->tile_begins.data();
  input.tile_turns = index_->chunks->tile_turns.data();
  input.num_tiles = static_cast<int64_t>(index_->chunks->tile_turns.size());
  kernels::attend_backward(input,
                           {.dq = bf16_bits(result.dq),
                            .dk = bf16_bits(result.dk),
                            .dv = bf16_bits(result.dv),
                            .dk_sums = dk_sums.data(),
                            .dv_sums = dv_sums.data()},
                           memory_->sums);
  return result;
}

}  // namespace banyan::ops
