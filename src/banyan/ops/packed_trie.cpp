// Compute options from tensors, the weight's compute form per call, and one attention context.
#include "banyan/ops/packed_trie.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include "banyan/core/error.h"
#include "banyan/ops/detail/dtype.h"
#include "banyan/ops/linear.h"

namespace banyan::ops {
namespace {

const std::vector<Sample>& checked(const std::vector<Sample>& samples) {
  BANYAN_CHECK(!samples.empty(), "[trie] samples: wanted at least one, got none");
  for (const Sample& sample : samples) {
    for (size_t t = 0; t < sample.tokens.size(); ++t) {
      BANYAN_CHECK(sample.tokens[t] >= 0,
                   "[trie] sample ",
                   sample.uid,
                   ": wanted token ids >= 0, got ",
                   sample.tokens[t],
                   " at ",
                   t,
                   "; strip padding first");
    }
  }
  return samples;
}

ComputeOptions options_of(const char* what, const at::Tensor& x) {
  const at::ScalarType dtype = x.scalar_type();
  BANYAN_CHECK(dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
               "[",
               what,
               "] dtype: wanted bfloat16, float32 or float64, got ",
               dtype);
  return {.dtype = dtype, .device = x.device(), .kernels = Kernels::kNative};
}

at::Tensor int_tensor(const std::vector<int32_t>& values, at::Device device) {
  return at::from_blob(const_cast<int32_t*>(values.data()),
                       {static_cast<int64_t>(values.size())},
                       at::TensorOptions().dtype(at::kInt))
      .clone()
      .to(device);
}

EdgeIndex index_of(const trie::Edges& edges, at::Device device) {
  return {.row_offsets = int_tensor(edges.row_offsets, device),
          .token = int_tensor(edges.token, device)};
}

// The native packing reads an fp32 master; elsewhere the weight is taken in the compute dtype.
LinearWeight head_of(const at::Tensor& weight, const ComputeOptions& options, bool with_backward) {
  BANYAN_CHECK(weight.dim() == 2 && weight.is_floating_point(),
               "[edge_logprob] weight: wanted floating-point [V, E], got ",
               weight.scalar_type(),
               " ",
               weight.sizes());
  LinearWeight head;
  const at::ScalarType master = is_native(options) ? at::kFloat : options.dtype;
  pack_weight(weight.to(master).contiguous(), options, with_backward, head);
  return head;
}

}  // namespace

PackedTrie::PackedTrie(const std::vector<Sample>& samples, const trie::BuildOptions& options)
    : trie_(trie::build(checked(samples), options)),
      edges_(trie::edges_of(trie_, samples, &logical_)) {}

TrieAttention& PackedTrie::context(const ComputeOptions& options) {
  const bool same = options.dtype == options_.dtype && options.device == options_.device;
  if (attention_ == nullptr || !same) {
    attention_ = std::make_unique<TrieAttention>(trie_, options);
    options_ = options;
  }
  return *attention_;
}

PackedTrie::Attention PackedTrie::attention_forward(const at::Tensor& q,
                                                    const at::Tensor& k,
                                                    const at::Tensor& v,
                                                    double scale) {
  const ComputeOptions options = options_of("tree_attention", q);
  const std::lock_guard lock(mutex_);
  Attention result;
  result.out = context(options).forward(/*layer=*/0, q, k, v, scale, &result.lse);
  return result;
}

AttentionGradients PackedTrie::attention_backward(const at::Tensor& grad_out,
                                                  const at::Tensor& q,
                                                  const at::Tensor& k,
                                                  const at::Tensor& v,
                                                  const Attention& forward,
                                                  double scale) {
  const ComputeOptions options = options_of("tree_attention", q);
  const std::lock_guard lock(mutex_);
  return context(options).backward(
      /*layer=*/0, grad_out, q, k, v, forward.out, forward.lse, scale);
}

EdgeLogprob PackedTrie::logprob_forward(const at::Tensor& rows,
                                        const at::Tensor& weight,
                                        double temperature,
                                        bool with_entropy) const {
  const ComputeOptions options = options_of("edge_logprob", rows);
  return edge_logprob_forward(rows,
                              head_of(weight, options, /*with_backward=*/false),
                              index_of(edges_, rows.device()),
                              temperature,
                              with_entropy,
                              options);
}

PackedTrie::LogprobGradients PackedTrie::logprob_backward(const at::Tensor& rows,
                                                          const at::Tensor& weight,
                                                          const EdgeLogprob& forward,
                                                          const at::Tensor& grad_logprob,
                                                          const at::Tensor& grad_entropy,
                                                          double temperature) const {
  const ComputeOptions options = options_of("edge_logprob", rows);
  const LinearWeight head = head_of(weight, options, /*with_backward=*/true);
  LogprobGradients result;
  result.weight =
      at::zeros(weight.sizes(), rows.options().dtype(detail::accumulate_type(rows.scalar_type())));
  result.rows = edge_logprob_backward(rows,
                                      head,
                                      index_of(edges_, rows.device()),
                                      forward,
                                      grad_logprob,
                                      grad_entropy,
                                      temperature,
                                      result.weight,
                                      options);
  return result;
}

}  // namespace banyan::ops
