// Attention over a pool of key/value pages, for the rollout. A page holds kPathTile consecutive
// path positions of one sequence (or of the trunk that several share), in the same tile layout that
// trie attention packs, so a row attended here has the bits it has in training, whatever rides in
// the same batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/core/device.h"
#include "banyan/ops/paged_batch.h"
#include "banyan/ops/trie_attention.h"

namespace banyan::ops {

struct AttentionOp;  // ops/slots.h

// Keys and values of all layers. A page is addressed by one index valid in every layer.
class KvPool {
 public:
  KvPool(int64_t num_layers,
         int64_t num_kv_heads,
         int64_t head_dim,
         int64_t num_pages,
         const ComputeOptions& options);

  int64_t num_pages() const { return num_pages_; }
  // Bytes of one page over all layers.
  int64_t page_bytes() const;
  static int64_t page_bytes(int64_t num_layers,
                            int64_t num_kv_heads,
                            int64_t head_dim,
                            const ComputeOptions& options);
  // Copies a whole page in every layer (copy-on-write of a shared tail).
  void copy_page(int32_t from, int32_t to);
  // A page to a slot of host memory and back. Slots are allocated when they are first used: pinned
  // where the pool is on another device.
  void spill_page(int32_t page, int32_t slot);
  void restore_page(int32_t slot, int32_t page);

  // Storage of one layer: native [pages, K, 2, tile bytes...] bf16 tiles, aten [pages, kPathTile,
  // K, 2, D].
  at::Tensor& layer(int64_t index) { return layers_.at(index); }
  const ComputeOptions& options() const { return options_; }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t head_dim() const { return head_dim_; }

 private:
  int64_t num_kv_heads_;
  int64_t head_dim_;
  int64_t num_pages_;
  ComputeOptions options_;
  std::vector<at::Tensor> layers_;
  std::vector<at::Tensor>
      slots_;  // per slot [layers, one page], on the host; undefined: not used yet
};

// Writes k, v of the batch into the pool, then attends. Pages that are written must have one owner,
// or be written by one run only. A page is written from its first position on. Backward throws:
// rollout only infers. The constructor throws [paged_attention] on a run that is empty, too short
// of pages, or names a page that the pool lacks.
class PagedAttention final : public AttentionContext {
 public:
  // grouped: siblings attend a page that they share together. It changes no bit.
  PagedAttention(KvPool& pool, std::vector<PagedRun> runs, bool grouped = true);
  ~PagedAttention() override;

  at::Tensor forward(int64_t layer,
                     const at::Tensor& q,
                     const at::Tensor& k,
                     const at::Tensor& v,
                     double scale,
                     at::Tensor* lse) override;
  AttentionGradients backward(int64_t layer,
                              const at::Tensor& grad_out,
                              const at::Tensor& q,
                              const at::Tensor& k,
                              const at::Tensor& v,
                              const at::Tensor& out,
                              const at::Tensor& lse,
                              double scale) override;

 private:
  template <typename Function>
  void for_each_run(const Function& fn) const;
  void write(const at::Tensor& k, const at::Tensor& v, at::Tensor& layer) const;
  at::Tensor attend(int64_t layer_index, const at::Tensor& q, double scale, at::Tensor* lse);
  at::Tensor forward_changed(const AttentionOp& op,
                             int64_t layer_index,
                             const at::Tensor& q,
                             double scale);

  struct Rows;  // what attends what, per token of the batch
  KvPool& pool_;
  std::vector<PagedRun> runs_;
  bool grouped_;
  std::unique_ptr<const Rows> rows_;
};

}  // namespace banyan::ops
