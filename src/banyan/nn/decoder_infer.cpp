// The decoder over one pass of the rollout: weights, tables and pages as pointers for
// kernels/cpu/decoder_pass.h.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/nn/decoder.h"

namespace banyan::nn {
namespace {

// Every weight of the body once, bf16, and each page of keys and values once.
profile::Work pass_work(const DecoderOptions& shape, const ops::PagedBatch& batch) {
  const int64_t attended = shape.heads * shape.head_dim;
  const int64_t kv = shape.kv_heads * shape.head_dim;
  const int64_t weights =
      shape.layers * shape.hidden * (2 * attended + 2 * kv + 3 * shape.intermediate);
  int64_t pairs = 0;
  for (const int32_t position : batch.positions()) pairs += position + 1;
  std::set<int32_t> pages;
  for (const ops::PagedRun& run : batch.runs()) pages.insert(run.pages.begin(), run.pages.end());
  const int64_t kept = static_cast<int64_t>(pages.size()) * ops::kPathTile;
  return {.flops = 2 * weights * batch.num_tokens() + 4 * attended * shape.layers * pairs,
          .bytes = 2 * weights + 4 * kv * shape.layers * kept};
}

uint16_t* bits_of(const at::Tensor& x) { return static_cast<uint16_t*>(x.data_ptr()); }

}  // namespace

at::Tensor Decoder::infer(ops::KvPool& pool, const ops::PagedBatch& batch) {
  const profile::Scope timed("decoder pass", [&] { return pass_work(shape_, batch); });
  BANYAN_ASSERT(can_infer(), "decoder: infer is for the native kernels, without experts");
  BANYAN_ASSERT(shape_.tensor == nullptr && shape_.stage == nullptr,
                "decoder: a rollout wants a whole model");
  rope_.reserve(batch.last_position() + 1);
  pass_.attention = {.num_heads = shape_.heads,
                     .num_kv_heads = shape_.kv_heads,
                     .head_dim = shape_.head_dim,
                     .scale = static_cast<float>(1.0 / std::sqrt(double(shape_.head_dim)))};
  pass_.hidden = shape_.hidden;
  pass_.intermediate = shape_.intermediate;
  pass_.norm_eps = static_cast<float>(shape_.norm_eps);
  const ops::LinearWeight& embedding = embedding_->compute();
  pass_.embedding_transposed = embedding.packed_t.defined();
  pass_.embedding = pass_.embedding_transposed
                        ? kernels::Panels{embedding.packed_t.const_data_ptr<c10::BFloat16>(),
                                          embedding.out,
                                          embedding.in}
                        : embedding_->panels();
  pass_.final_norm = norm_->bits();
  pass_.cos = rope_.cos().const_data_ptr<float>();
  pass_.sin = rope_.sin().const_data_ptr<float>();
  pass_.layers.resize(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i]->attention.fill(pass_.layers[i]);
    layers_[i]->mlp->fill(pass_.layers[i]);
    pass_.layers[i].tiles = bits_of(pool.layer(static_cast<int64_t>(i)));
  }
  const int64_t rows = batch.num_wanted();
  if (!hidden_.defined() || hidden_.size(0) < rows) {
    hidden_ = at::empty({std::max<int64_t>(rows, 1), shape_.hidden}, at::kBFloat16);
    wanted_ = hidden_;
  }
  if (wanted_.size(0) != rows) wanted_ = hidden_.narrow(0, 0, rows);
  kernels::decoder_pass(pass_, batch.rows(), workspace_, bits_of(hidden_));
  return wanted_;
}

}  // namespace banyan::nn
