// Inputs and dense baselines shared by the tests of trie and paged attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/core/device.h"
#include "banyan/trie/trie.h"

namespace banyan::ops::attention_test {

struct Heads {
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  double scale() const;
};

// q, k, v of `tokens` tokens and the gradient of the output, normal, seeded; fp64 values that are
// exact in bf16 where `exact` asks for it.
struct Inputs {
  at::Tensor q, k, v, grad_out;
  Inputs to(at::ScalarType dtype) const;
  Inputs select(const std::vector<int32_t>& tokens) const;
};
Inputs random_inputs(int64_t tokens, const Heads& heads, uint64_t seed, bool exact);

struct Result {
  at::Tensor out, lse, dq, dk, dv;
};
// forward and backward of a context.
Result run(AttentionContext& context, const Inputs& inputs, double scale);

// The gradient of the output that each sample sends back, [n, H, D] fp64 per sample, and their sum
// per packed token.
struct SampleGradients {
  std::vector<at::Tensor> of_sample;
  at::Tensor packed;
};
SampleGradients random_gradients(const trie::Trie& trie, const Heads& heads, uint64_t seed);

// Dense attention per sample in fp64 double loops, put back on packed tokens: out and lse (any
// sample that passes), gradients summed over samples.
Result dense_oracle(const trie::Trie& trie,
                    const Inputs& inputs,
                    const SampleGradients& gradients,
                    double scale);

// The same through bf16 at::_scaled_dot_product_flash_attention_for_cpu, each sample apart;
// gradients of a token summed over samples in fp32.
Result dense_bf16(const trie::Trie& trie,
                  const Inputs& inputs,
                  const SampleGradients& gradients,
                  double scale);

double relative_error(const at::Tensor& got, const at::Tensor& wanted);
bool same_bits(const at::Tensor& a, const at::Tensor& b);
at::Tensor index_of(const std::vector<int32_t>& tokens);

// Samples of given (trunk, suffixes) lengths: every suffix hangs on one trunk.
std::vector<Sample> fork_samples(int32_t trunk, const std::vector<int32_t>& suffixes);

}  // namespace banyan::ops::attention_test
