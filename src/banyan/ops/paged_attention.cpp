// The KV pool and attention over its pages: the native kernel of trie attention reading pages as
// tiles, or one dense attention per run over its gathered pages in plain LibTorch operators.
#include "banyan/ops/paged_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "banyan/core/error.h"
#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/huge_pages.h"
#include "banyan/kernels/cpu/work_items.h"
#include "banyan/ops/detail/attention_aten.h"
#include "banyan/ops/detail/attention_check.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/slots.h"

namespace banyan::ops {

using detail::bf16_bits;

// --- pool ---

KvPool::KvPool(int64_t num_layers,
               int64_t num_kv_heads,
               int64_t head_dim,
               int64_t num_pages,
               const ComputeOptions& options)
    : num_kv_heads_(num_kv_heads), head_dim_(head_dim), num_pages_(num_pages), options_(options) {
  BANYAN_CHECK(num_layers >= 1 && num_kv_heads >= 1 && head_dim >= 1 && num_pages >= 1,
               "[kv_pool] layers, kv heads, head_dim, pages: wanted >= 1 each, got ",
               num_layers,
               ", ",
               num_kv_heads,
               ", ",
               head_dim,
               ", ",
               num_pages);
  BANYAN_CHECK(!is_native(options) || head_dim % 2 == 0,
               "[kv_pool] head_dim: wanted an even number for the native kernels, got ",
               head_dim);
  const auto tensor_options = at::TensorOptions().dtype(options.dtype).device(options.device);
  layers_.reserve(num_layers);
  for (int64_t i = 0; i < num_layers; ++i) {
    // Native memory is not touched before it is written: a page zeroes what it must
    // (write_position).
    layers_.push_back(
        is_native(options)
            ? at::empty({num_pages, num_kv_heads, 2, kPathTile * head_dim}, tensor_options)
            : at::zeros({num_pages, kPathTile, num_kv_heads, 2, head_dim}, tensor_options));
    if (is_native(options)) {
      kernels::advise_huge_pages(layers_.back().data_ptr(), layers_.back().nbytes());
    }
  }
}

int64_t KvPool::page_bytes() const {
  return page_bytes(static_cast<int64_t>(layers_.size()), num_kv_heads_, head_dim_, options_);
}

int64_t KvPool::page_bytes(int64_t num_layers,
                           int64_t num_kv_heads,
                           int64_t head_dim,
                           const ComputeOptions& options) {
  return num_layers * num_kv_heads * 2 * kPathTile * head_dim *
         static_cast<int64_t>(c10::elementSize(options.dtype));
}

void KvPool::copy_page(int32_t from, int32_t to) {
  BANYAN_ASSERT(from >= 0 && from < num_pages_ && to >= 0 && to < num_pages_ && from != to,
                "[kv_pool] copy of page ",
                from,
                " to ",
                to);
  if (!is_native(options_)) {
    for (at::Tensor& layer : layers_) layer.select(0, to).copy_(layer.select(0, from));
    return;
  }
  const int64_t size = layers_[0].stride(0);
  at::parallel_for(0, static_cast<int64_t>(layers_.size()), 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint16_t* pages = bf16_bits(layers_[i]);
      std::memcpy(pages + to * size, pages + from * size, size * sizeof(uint16_t));
    }
  });
}

void KvPool::spill_page(int32_t page, int32_t slot) {
  BANYAN_ASSERT(page >= 0 && page < num_pages_ && slot >= 0,
                "[kv_pool] spill of page ",
                page,
                " to slot ",
                slot);
  if (slot >= static_cast<int32_t>(slots_.size())) slots_.resize(slot + 1);
  at::Tensor& host = slots_[slot];
  if (!host.defined()) {
    std::vector<int64_t> sizes = layers_[0].select(0, 0).sizes().vec();
    sizes.insert(sizes.begin(), static_cast<int64_t>(layers_.size()));
    host = at::empty(sizes,
                     at::TensorOptions()
                         .dtype(options_.dtype)
                         .device(at::kCPU)
                         .pinned_memory(!options_.device.is_cpu()));
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    host.select(0, static_cast<int64_t>(i)).copy_(layers_[i].select(0, page));
  }
}

void KvPool::restore_page(int32_t slot, int32_t page) {
  BANYAN_ASSERT(page >= 0 && page < num_pages_ && slot >= 0 &&
                    slot < static_cast<int32_t>(slots_.size()) && slots_[slot].defined(),
                "[kv_pool] restore of slot ",
                slot,
                " to page ",
                page);
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].select(0, page).copy_(slots_[slot].select(0, static_cast<int64_t>(i)));
  }
}

// --- attention ---

// Per token of the batch, in order.
struct PagedAttention::Rows {
  std::vector<const int32_t*> pages;  // of its run
  std::vector<int32_t> visible;       // its path position + 1
  std::vector<int32_t> run;           // its run
};

PagedAttention::PagedAttention(KvPool& pool, std::vector<PagedRun> runs, bool grouped)
    : pool_(pool), runs_(std::move(runs)), grouped_(grouped) {
  Rows rows;
  for (const PagedRun& run : runs_) {
    check_run(run, pool_.num_pages());
    for (int32_t i = 0; i < run.num_tokens; ++i) {
      rows.pages.push_back(run.pages.data());
      rows.visible.push_back(run.first_position + i + 1);
      rows.run.push_back(static_cast<int32_t>(&run - runs_.data()));
    }
  }
  rows_ = std::make_unique<const Rows>(std::move(rows));
}

PagedAttention::~PagedAttention() = default;

namespace {

// Keys and values of the batch into their pages; tokens of one page are written by one thread, in
// order.
void write_native(const std::vector<PagedRun>& runs,
                  const at::Tensor& k,
                  const at::Tensor& v,
                  at::Tensor& layer) {
  const int64_t kv_heads = k.size(1);
  const int64_t dim = k.size(2);
  const int64_t size = kernels::tile_elements(dim);
  const uint16_t* keys = bf16_bits(k);
  const uint16_t* values = bf16_bits(v);
  uint16_t* tiles = bf16_bits(layer);
  std::vector<int64_t> first_token(runs.size(), 0);
  for (size_t r = 1; r < runs.size(); ++r) {
    first_token[r] = first_token[r - 1] + runs[r - 1].num_tokens;
  }
  const int64_t num_items = static_cast<int64_t>(runs.size()) * kv_heads;
  kernels::for_each_item(num_items, [&](const auto& next) {
    for (int64_t item = next(); item >= 0; item = next()) {
      const PagedRun& run = runs[item / kv_heads];
      const int64_t head = item % kv_heads;
      for (int64_t i = 0; i < run.num_tokens; ++i) {
        const int64_t position = run.first_position + i;
        const int64_t at = ((first_token[item / kv_heads] + i) * kv_heads + head) * dim;
        const int64_t page = run.pages[position / kPathTile];
        kernels::write_position(keys + at,
                                values + at,
                                position % kPathTile,
                                dim,
                                tiles + (page * kv_heads + head) * size);
      }
    }
  });
}

// Keys and values of a run into its pages.
void write_run_aten(const PagedRun& run,
                    const at::Tensor& k,
                    const at::Tensor& v,
                    at::Tensor& layer) {
  const int64_t length = static_cast<int64_t>(run.first_position) + run.num_tokens;
  for (int64_t position = run.first_position; position < length;) {
    const int64_t stop = std::min(length, (position / kPathTile + 1) * kPathTile);
    at::Tensor page = layer.select(0, run.pages[position / kPathTile])
                          .slice(0, position % kPathTile, position % kPathTile + stop - position);
    const int64_t first = position - run.first_position;
    page.select(2, 0).copy_(k.slice(0, first, first + stop - position));
    page.select(2, 1).copy_(v.slice(0, first, first + stop - position));
    position = stop;
  }
}

struct PathKeys {
  at::Tensor k;  // [L, K, D]
  at::Tensor v;
};

// Keys and values of all positions of a run, from its pages.
PathKeys path_keys(const PagedRun& run, const at::Tensor& layer, bool native) {
  const int64_t length = static_cast<int64_t>(run.first_position) + run.num_tokens;
  const at::Tensor pages =
      layer.index_select(0, at::tensor(run.pages, at::kInt).to(layer.device()));
  if (!native) {
    const at::Tensor all = pages.flatten(0, 1).slice(0, 0, length);  // [L, K, 2, D]
    return {all.select(2, 0), all.select(2, 1)};
  }
  // The forms of kernels/cpu/attention_tile.h: keys [D / 2][64][2], values [64 / 2][D][2].
  const int64_t n = pages.size(0);
  const int64_t heads = pages.size(1);
  const int64_t dim = pages.size(3) / kPathTile;
  return {pages.select(2, 0)
              .reshape({n, heads, dim / 2, kPathTile, 2})
              .permute({0, 3, 1, 2, 4})
              .reshape({n * kPathTile, heads, dim})
              .slice(0, 0, length),
          pages.select(2, 1)
              .reshape({n, heads, kPathTile / 2, dim, 2})
              .permute({0, 2, 4, 1, 3})
              .reshape({n * kPathTile, heads, dim})
              .slice(0, 0, length)};
}

// One run attends over all of its positions.
at::Tensor attend_run_aten(const PagedRun& run,
                           const at::Tensor& q,
                           const at::Tensor& layer,
                           double scale,
                           at::Tensor* lse) {
  const PathKeys keys = path_keys(run, layer, /*native=*/false);
  const detail::DenseAttention dense = detail::dense_attention(q, keys.k, keys.v, scale);
  if (lse != nullptr) *lse = dense.lse;
  return dense.out;
}

}  // namespace

// fn(run, its first token in the batch, the one behind its last)
template <typename Function>
void PagedAttention::for_each_run(const Function& fn) const {
  int64_t first = 0;
  for (const PagedRun& run : runs_) {
    fn(run, first, first + run.num_tokens);
    first += run.num_tokens;
  }
}

void PagedAttention::write(const at::Tensor& k, const at::Tensor& v, at::Tensor& layer) const {
  if (is_native(pool_.options())) {
    write_native(runs_, k.contiguous(), v.contiguous(), layer);
    return;
  }
  for_each_run([&](const PagedRun& run, int64_t first, int64_t last) {
    write_run_aten(run, k.slice(0, first, last), v.slice(0, first, last), layer);
  });
}

// The slot's chain, run by run: the positions before are keys only, and each follows the one before
// it. The original attends that run as without a slot; if a wrapper hands it other keys or values,
// with plain operators over those.
at::Tensor PagedAttention::forward_changed(const AttentionOp& op,
                                           int64_t layer_index,
                                           const at::Tensor& q,
                                           double scale) {
  at::Tensor out = at::empty(q.sizes(), q.options());
  const at::Tensor& layer = pool_.layer(layer_index);
  for_each_run([&](const PagedRun& run, int64_t first, int64_t last) {
    const PathKeys keys = path_keys(run, layer, is_native(pool_.options()));
    AttentionCall call{.layer = layer_index,
                       .q = q.slice(0, first, last),
                       .k = keys.k,
                       .v = keys.v,
                       .parent = at::arange(-1, keys.k.size(0) - 1, at::kInt),
                       .scale = scale};
    call.own_forward = [&](const AttentionCall& of) {
      AttentionResult result;
      if (of.k.is_same(keys.k) && of.v.is_same(keys.v)) {
        result.out =
            PagedAttention(pool_, {run}, grouped_).attend(layer_index, of.q, of.scale, &result.lse);
      } else {
        detail::DenseAttention dense = detail::dense_attention(of.q, of.k, of.v, of.scale);
        result = {std::move(dense.out), std::move(dense.lse)};
      }
      return result;
    };
    const at::Tensor rows = op.forward(call).out;
    out.slice(0, first, last).copy_(slot_result(attention_slot(), "out", rows, call.q.sizes(), q));
  });
  return out;
}

at::Tensor PagedAttention::forward(int64_t layer_index,
                                   const at::Tensor& q,
                                   const at::Tensor& k,
                                   const at::Tensor& v,
                                   double scale,
                                   at::Tensor* lse) {
  const int64_t num_tokens = static_cast<int64_t>(rows_->visible.size());
  detail::check_attention_inputs("paged_attention", num_tokens, q, k, v, pool_.options());
  BANYAN_CHECK(k.size(1) == pool_.num_kv_heads() && k.size(2) == pool_.head_dim(),
               "[paged_attention] k: wanted the pool's kv heads and head_dim ",
               pool_.num_kv_heads(),
               ", ",
               pool_.head_dim(),
               ", got ",
               k.sizes());
  write(k, v, pool_.layer(layer_index));
  if (const auto op = attention_slot().changed()) [[unlikely]] {
    BANYAN_ASSERT(lse == nullptr, "[paged_attention] the rollout wants no lse");
    return forward_changed(*op, layer_index, q, scale);
  }
  return attend(layer_index, q, scale, lse);
}

// Over what the pages hold.
at::Tensor PagedAttention::attend(int64_t layer_index,
                                  const at::Tensor& q,
                                  double scale,
                                  at::Tensor* lse) {
  at::Tensor& layer = pool_.layer(layer_index);
  at::Tensor out = at::empty(q.sizes(), q.options());
  if (lse != nullptr) {
    *lse = at::empty({q.size(0), q.size(1)},
                     q.options().dtype(detail::accumulate_type(q.scalar_type())));
  }
  if (!is_native(pool_.options())) {
    for_each_run([&](const PagedRun& run, int64_t first, int64_t last) {
      at::Tensor run_lse;
      out.slice(0, first, last)
          .copy_(attend_run_aten(
              run, q.slice(0, first, last), layer, scale, lse == nullptr ? nullptr : &run_lse));
      if (lse != nullptr) lse->slice(0, first, last).copy_(run_lse);
    });
    return out;
  }
  const at::Tensor queries = q.contiguous();
  kernels::AttendInput input;
  input.shape = {.num_heads = q.size(1),
                 .num_kv_heads = pool_.num_kv_heads(),
                 .head_dim = pool_.head_dim(),
                 .scale = static_cast<float>(scale)};
  input.num_tokens = q.size(0);
  input.q = bf16_bits(queries);
  input.q_stride = queries.stride(0);
  input.tiles = bf16_bits(layer);
  input.tile_lists = rows_->pages.data();
  input.visible = rows_->visible.data();
  if (!grouped_) input.runs = rows_->run.data();
  kernels::attend(input, bf16_bits(out), lse == nullptr ? nullptr : lse->data_ptr<float>());
  return out;
}

AttentionGradients PagedAttention::backward(int64_t,
                                            const at::Tensor&,
                                            const at::Tensor&,
                                            const at::Tensor&,
                                            const at::Tensor&,
                                            const at::Tensor&,
                                            const at::Tensor&,
                                            double) {
  BANYAN_ASSERT(false, "[paged_attention] backward: the rollout only infers");
  return {};
}

}  // namespace banyan::ops
