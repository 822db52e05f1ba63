// The decoder over one pass of the rollout: weights, tables and pages as pointers for
// kernels/cpu/decoder_pass.h.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "banyan/core/error.h"
#include "banyan/nn/decoder.h"

namespace banyan::nn {
namespace {

uint16_t* bits_of(const at::Tensor& x) { return static_cast<uint16_t*>(x.data_ptr()); }

}  // namespace

at::Tensor Decoder::infer(ops::KvPool& pool, const ops::PagedBatch& batch) {
  BANYAN_ASSERT(is_native(options_), "decoder: infer is for the native kernels");
  rope_.reserve(batch.last_position() + 1);
  pass_.attention = {.num_heads = shape_.heads,
                     .num_kv_heads = shape_.kv_heads,
                     .head_dim = shape_.head_dim,
                     .scale = static_cast<float>(1.0 / std::sqrt(double(shape_.head_dim)))};
  pass_.hidden = shape_.hidden;
  pass_.intermediate = shape_.intermediate;
  pass_.norm_eps = static_cast<float>(shape_.norm_eps);
  const ops::LinearWeight& embedding = embedding_.compute();
  pass_.embedding_transposed = embedding.packed_t.defined();
  pass_.embedding = pass_.embedding_transposed
                        ? kernels::Panels{embedding.packed_t.const_data_ptr<c10::BFloat16>(),
                                          embedding.out,
                                          embedding.in}
                        : embedding_.panels();
  pass_.final_norm = norm_.bits();
  pass_.cos = rope_.cos().const_data_ptr<float>();
  pass_.sin = rope_.sin().const_data_ptr<float>();
  pass_.layers.resize(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i]->attention.fill(pass_.layers[i]);
    layers_[i]->mlp.fill(pass_.layers[i]);
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
