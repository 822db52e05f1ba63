#include "banyan/ops/attention_test_util.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "banyan/ops/attention_reference.h"

namespace banyan::ops::attention_test {

double Heads::scale() const { return 1.0 / std::sqrt(static_cast<double>(dim)); }

Inputs Inputs::to(at::ScalarType dtype) const {
  return {q.to(dtype), k.to(dtype), v.to(dtype), grad_out.to(dtype)};
}

Inputs Inputs::select(const std::vector<int32_t>& tokens) const {
  const at::Tensor index = index_of(tokens);
  return {q.index_select(0, index),
          k.index_select(0, index),
          v.index_select(0, index),
          grad_out.index_select(0, index)};
}

Inputs random_inputs(int64_t tokens, const Heads& heads, uint64_t seed, bool exact) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto draw = [&](int64_t count) {
    at::Tensor x = at::randn({tokens, count, heads.dim}, generator, at::kDouble);
    return exact ? x.to(at::kBFloat16).to(at::kDouble) : x;
  };
  Inputs inputs;
  inputs.q = draw(heads.heads);
  inputs.k = draw(heads.kv_heads);
  inputs.v = draw(heads.kv_heads);
  inputs.grad_out = draw(heads.heads);
  return inputs;
}

Result run(AttentionContext& context, const Inputs& inputs, double scale) {
  Result result;
  result.out = context.forward(0, inputs.q, inputs.k, inputs.v, scale, &result.lse);
  const AttentionGradients gradients = context.backward(
      0, inputs.grad_out, inputs.q, inputs.k, inputs.v, result.out, result.lse, scale);
  result.dq = gradients.dq;
  result.dk = gradients.dk;
  result.dv = gradients.dv;
  return result;
}

SampleGradients random_gradients(const trie::Trie& trie, const Heads& heads, uint64_t seed) {
  const at::Generator generator = at::detail::createCPUGenerator(seed + 1000);
  SampleGradients result;
  result.packed = at::zeros({trie.num_tokens(), heads.heads, heads.dim}, at::kDouble);
  for (size_t s = 0; s < trie.sample_end.size(); ++s) {
    const std::vector<int32_t> path = trie.path(static_cast<int32_t>(s));
    result.of_sample.push_back(at::randn(
        {static_cast<int64_t>(path.size()), heads.heads, heads.dim}, generator, at::kDouble));
    result.packed.index_add_(0, index_of(path), result.of_sample.back());
  }
  return result;
}

Result dense_oracle(const trie::Trie& trie,
                    const Inputs& inputs,
                    const SampleGradients& gradients,
                    double scale) {
  Result result{at::zeros_like(inputs.q),
                at::zeros({inputs.q.size(0), inputs.q.size(1)}, at::kDouble),
                at::zeros_like(inputs.q),
                at::zeros_like(inputs.k),
                at::zeros_like(inputs.v)};
  for (size_t s = 0; s < trie.sample_end.size(); ++s) {
    const std::vector<int32_t> path = trie.path(static_cast<int32_t>(s));
    const at::Tensor index = index_of(path);
    const Inputs own = inputs.select(path);
    const AttentionReference forward = attention_reference(own.q, own.k, own.v, scale);
    const AttentionReferenceGradients own_gradients =
        attention_reference_backward(gradients.of_sample[s], own.q, own.k, own.v, scale);
    result.out.index_copy_(0, index, forward.out);
    result.lse.index_copy_(0, index, forward.lse);
    result.dq.index_add_(0, index, own_gradients.dq);
    result.dk.index_add_(0, index, own_gradients.dk);
    result.dv.index_add_(0, index, own_gradients.dv);
  }
  return result;
}

Result dense_bf16(const trie::Trie& trie,
                  const Inputs& inputs,
                  const SampleGradients& gradients,
                  double scale) {
  const int64_t group = inputs.q.size(1) / inputs.k.size(1);
  const auto wide = inputs.q.options().dtype(at::kFloat);
  Result result{at::zeros(inputs.q.sizes(), wide),
                at::zeros({inputs.q.size(0), inputs.q.size(1)}, wide),
                at::zeros(inputs.q.sizes(), wide),
                at::zeros(inputs.k.sizes(), wide),
                at::zeros(inputs.v.sizes(), wide)};
  const auto heads_first = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  const auto tokens_first = [](const at::Tensor& x) {
    return x.squeeze(0).transpose(0, 1).to(at::kFloat);
  };
  const auto sum_groups = [&](const at::Tensor& x) {  // [n, H, D] -> [n, K, D]
    return x.unflatten(1, {x.size(1) / group, group}).sum({2});
  };
  for (size_t s = 0; s < trie.sample_end.size(); ++s) {
    const std::vector<int32_t> path = trie.path(static_cast<int32_t>(s));
    const at::Tensor index = index_of(path);
    const Inputs own = inputs.select(path).to(at::kBFloat16);
    const at::Tensor q = heads_first(own.q);
    const at::Tensor k = heads_first(own.k.repeat_interleave(group, 1));
    const at::Tensor v = heads_first(own.v.repeat_interleave(group, 1));
    const auto [out, lse] =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true, {}, scale);
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        heads_first(gradients.of_sample[s].to(at::kBFloat16)),
        q,
        k,
        v,
        out,
        lse,
        0.0,
        true,
        {},
        scale);
    result.out.index_copy_(0, index, tokens_first(out));
    result.dq.index_add_(0, index, tokens_first(dq));
    result.dk.index_add_(0, index, sum_groups(tokens_first(dk)));
    result.dv.index_add_(0, index, sum_groups(tokens_first(dv)));
  }
  return result;
}

double relative_error(const at::Tensor& got, const at::Tensor& wanted) {
  const at::Tensor w = wanted.to(at::kDouble);
  const double norm = w.norm().item<double>();
  const double error = got.to(at::kDouble).sub(w).norm().item<double>();
  return norm == 0.0 ? error : error / norm;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::ScalarType bits = a.element_size() == 2   ? at::kShort
                              : a.element_size() == 4 ? at::kInt
                                                      : at::kLong;
  return at::equal(a.contiguous().view(bits), b.contiguous().view(bits));
}

at::Tensor index_of(const std::vector<int32_t>& tokens) { return at::tensor(tokens, at::kLong); }

std::vector<Sample> fork_samples(int32_t trunk, const std::vector<int32_t>& suffixes) {
  std::vector<Sample> samples;
  for (size_t s = 0; s < suffixes.size(); ++s) {
    Sample sample;
    sample.uid = static_cast<int64_t>(s);
    for (int32_t i = 0; i < trunk; ++i) sample.tokens.push_back(i % 50);
    for (int32_t i = 0; i < suffixes[s]; ++i) {
      sample.tokens.push_back(i == 0 ? 60 + static_cast<int32_t>(s) : i % 50);
    }
    samples.push_back(sample);
  }
  return samples;
}

}  // namespace banyan::ops::attention_test
