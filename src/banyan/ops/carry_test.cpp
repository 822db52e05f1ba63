// Trie attention on a trie cut into blocks equals attention on the whole trie, whatever the cut.
#include "banyan/ops/carry.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "banyan/core/rng.h"
#include "banyan/ops/attention_test_util.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/testing/one_thread.h"
#include "banyan/testing/random_trie.h"

namespace banyan::ops {
namespace {

using namespace attention_test;

const ComputeOptions kNativeBf16{at::kBFloat16, at::kCPU, Kernels::kNative};
const ComputeOptions kDouble{at::kDouble, at::kCPU, Kernels::kAten};
const ComputeOptions kFloat{at::kFloat, at::kCPU, Kernels::kAten};
constexpr Heads kHeads{9, 3, 64};
constexpr Heads kSmallHeads{4, 2, 16};

// Tokens [begin, end) of a whole trie as a block: the path above them first.
struct CutBlock {
  trie::Trie trie;
  std::vector<int32_t> tokens;  // packed token of the whole trie, per token of `trie`
  BlockCarry carry;
  CarryStore store;
  std::vector<int32_t> own() const { return {tokens.begin() + carry.num_carried, tokens.end()}; }
};

trie::Trie part_of(const trie::Trie& whole,
                   const std::vector<Sample>& samples,
                   int32_t begin,
                   int32_t end,
                   std::vector<int32_t>& tokens) {
  std::vector<Sample> parts;
  std::vector<std::vector<int32_t>> paths;
  for (size_t s = 0; s < samples.size(); ++s) {
    std::vector<int32_t> path = whole.path(static_cast<int32_t>(s));
    while (!path.empty() && path.back() >= end) path.pop_back();
    if (path.empty() || path.back() < begin) continue;
    Sample part = samples[s];
    part.tokens.resize(path.size());
    if (!part.positions.empty()) part.positions.resize(path.size());
    part.scored.clear();
    parts.push_back(part);
    paths.push_back(path);
  }
  const trie::Trie trie = trie::build(parts);
  tokens.assign(trie.num_tokens(), -1);
  for (size_t s = 0; s < parts.size(); ++s) {
    const std::vector<int32_t> local = trie.path(static_cast<int32_t>(s));
    for (size_t i = 0; i < local.size(); ++i) tokens[local[i]] = paths[s][i];
  }
  return trie;
}

// Cuts before each of the tokens `cuts`, ascending.
std::vector<std::unique_ptr<CutBlock>> cut(const trie::Trie& whole,
                                           const std::vector<Sample>& samples,
                                           std::vector<int32_t> cuts) {
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(whole.num_tokens());
  std::vector<std::unique_ptr<CutBlock>> blocks;
  for (size_t b = 0; b + 1 < cuts.size(); ++b) {
    auto block = std::make_unique<CutBlock>();
    block->trie = part_of(whole, samples, cuts[b], cuts[b + 1], block->tokens);
    BlockCarry& carry = block->carry;
    carry.num_carried = block->trie.num_tokens() - (cuts[b + 1] - cuts[b]);
    for (int32_t t = 0; t < block->trie.num_tokens(); ++t) {
      const int32_t token = block->tokens[t];
      if (t < carry.num_carried) {
        const size_t owner = std::upper_bound(cuts.begin(), cuts.end(), token) - cuts.begin() - 1;
        CarryStore* store = &blocks[owner]->store;
        if (carry.sources.empty() || carry.sources.back().store != store) {
          carry.sources.push_back({store, 0});
        }
        ++carry.sources.back().count;
      } else if (whole.tout[token] > cuts[b + 1]) {
        carry.offered.push_back(t);
      }
    }
    if (!carry.offered.empty()) carry.out = &block->store;
    blocks.push_back(std::move(block));
  }
  return blocks;
}

// Blocks forward in order and backward in reverse order; results on the tokens of the whole trie.
Result run_cut(const trie::Trie& whole,
               const std::vector<Sample>& samples,
               const std::vector<int32_t>& cuts,
               const Inputs& inputs,
               double scale,
               const ComputeOptions& options) {
  auto blocks = cut(whole, samples, cuts);
  std::vector<std::unique_ptr<TrieAttention>> contexts;
  std::vector<Inputs> parts;
  std::vector<Result> results;
  for (auto& block : blocks) {
    contexts.push_back(std::make_unique<TrieAttention>(block->trie, options, block->carry));
    parts.push_back(inputs.select(block->own()));
    const Inputs& part = parts.back();
    Result result;
    result.out = contexts.back()->forward(0, part.q, part.k, part.v, scale, &result.lse);
    results.push_back(result);
  }
  for (size_t b = blocks.size(); b-- > 0;) {
    const Inputs& part = parts[b];
    const AttentionGradients gradients = contexts[b]->backward(
        0, part.grad_out, part.q, part.k, part.v, results[b].out, results[b].lse, scale);
    results[b].dq = gradients.dq;
    results[b].dk = gradients.dk;
    results[b].dv = gradients.dv;
  }
  Result all;
  for (at::Tensor Result::* which :
       {&Result::out, &Result::lse, &Result::dq, &Result::dk, &Result::dv}) {
    std::vector<int64_t> sizes = (results[0].*which).sizes().vec();
    sizes[0] = whole.num_tokens();
    all.*which = at::zeros(sizes, (results[0].*which).options());
    for (size_t b = 0; b < blocks.size(); ++b) {
      (all.*which).index_copy_(0, index_of(blocks[b]->own()), results[b].*which);
    }
  }
  return all;
}

std::vector<std::vector<int32_t>> some_cuts(const std::string& name, int32_t num_tokens) {
  std::vector<std::vector<int32_t>> out;
  if (name == "toy") out = {{3, 6, 8, 12}, {1, 2, 3, 4, 5, 9, 13}, {6}, {2, 11}, {3}};
  for (uint64_t draw = 0; draw < 3; ++draw) {
    std::vector<int32_t> cuts;
    for (int32_t t = 1; t < num_tokens; ++t) {
      if (philox(draw, static_cast<uint64_t>(t), 7)[0] % (draw == 0 ? 40 : 9) == 0) {
        cuts.push_back(t);
      }
    }
    out.push_back(cuts);
  }
  return out;
}

std::vector<testing::TrieCase> all_cases() {
  std::vector<testing::TrieCase> cases = testing::trie_cases(11, 97);
  cases.push_back({"tile_edges_0", fork_samples(63, {1, 64, 65, 2})});
  cases.push_back({"tile_edges_1", fork_samples(130, {1, 63, 64, 65})});
  cases.push_back({"tile_edges_2", fork_samples(65, {0, 1, 63, 62})});
  return cases;
}

// Relative to the wanted tensor, which is rounding noise where every token stands alone (dq and dk
// are zero then), or to the inputs.
double error_of(const at::Tensor& got, const at::Tensor& wanted, const Inputs& inputs) {
  const double scale = std::max(wanted.norm().item<double>(), 0.1 * inputs.q.norm().item<double>());
  return got.to(at::kDouble).sub(wanted).norm().item<double>() / scale;
}

TEST(Carry, Fp64AndFp32EqualTheUncutTrie) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : all_cases()) {
    const trie::Trie trie = trie::build(c.samples);
    const Inputs inputs = random_inputs(trie.num_tokens(), kSmallHeads, 5, /*exact=*/false);
    TrieAttention uncut(trie, kDouble);
    const Result wanted = run(uncut, inputs, kSmallHeads.scale());
    for (const auto& cuts : some_cuts(c.name, trie.num_tokens())) {
      for (const ComputeOptions& options : {kDouble, kFloat}) {
        const double tolerance = options.dtype == at::kDouble ? 1e-12 : 1e-5;
        const Result got =
            run_cut(trie, c.samples, cuts, inputs.to(options.dtype), kSmallHeads.scale(), options);
        EXPECT_LE(error_of(got.out, wanted.out, inputs), tolerance) << c.name;
        EXPECT_LE(error_of(got.lse, wanted.lse, inputs), tolerance) << c.name;
        EXPECT_LE(error_of(got.dq, wanted.dq, inputs), tolerance) << c.name;
        EXPECT_LE(error_of(got.dk, wanted.dk, inputs), tolerance) << c.name;
        EXPECT_LE(error_of(got.dv, wanted.dv, inputs), tolerance) << c.name;
      }
    }
  }
}

TEST(Carry, ForwardBitsDoNotDependOnTheCut) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : all_cases()) {
    const trie::Trie trie = trie::build(c.samples);
    const Inputs inputs = random_inputs(trie.num_tokens(), kHeads, 3, true).to(at::kBFloat16);
    TrieAttention uncut(trie, kNativeBf16);
    const Result wanted = run(uncut, inputs, kHeads.scale());
    for (const auto& cuts : some_cuts(c.name, trie.num_tokens())) {
      const Result got = run_cut(trie, c.samples, cuts, inputs, kHeads.scale(), kNativeBf16);
      EXPECT_TRUE(same_bits(got.out, wanted.out)) << c.name;
      EXPECT_TRUE(same_bits(got.lse, wanted.lse)) << c.name;
    }
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A16 item 2, cut: one rounding, as without a cut.
TEST(Carry, NativeGradientsAreNoFurtherFromTheOracleThanUncutOnes) {
  const testing::OneThread one_thread;
  const std::vector<Sample> samples = fork_samples(70, {40, 30, 65, 20, 33});
  const trie::Trie trie = trie::build(samples);
  std::vector<double> dq, dk, dv;
  for (uint64_t seed = 0; seed < 7; ++seed) {
    Inputs inputs = random_inputs(trie.num_tokens(), kHeads, seed, /*exact=*/true);
    inputs.grad_out = inputs.grad_out.to(at::kBFloat16).to(at::kDouble);
    TrieAttention exact(trie, kDouble);
    const Result wanted = run(exact, inputs, kHeads.scale());
    const Inputs in_bf16 = inputs.to(at::kBFloat16);
    TrieAttention native(trie, kNativeBf16);
    const Result uncut = run(native, in_bf16, kHeads.scale());
    const Result got =
        run_cut(trie, samples, {30, 64, 85, 110, 200}, in_bf16, kHeads.scale(), kNativeBf16);
    const auto ratio = [&](const at::Tensor Result::* which) {
      return relative_error(got.*which, wanted.*which) /
             relative_error(uncut.*which, wanted.*which);
    };
    dq.push_back(ratio(&Result::dq));
    dk.push_back(ratio(&Result::dk));
    dv.push_back(ratio(&Result::dv));
  }
  EXPECT_LE(median(dq), 1.05);
  EXPECT_LE(median(dk), 1.05);
  EXPECT_LE(median(dv), 1.05);
}

TEST(Carry, RepeatedRunsAndThreadCountsGiveEqualBits) {
  const std::vector<Sample> samples = fork_samples(150, {40, 30, 65, 20, 1, 1, 128});
  const trie::Trie trie = trie::build(samples);
  const Inputs inputs = random_inputs(trie.num_tokens(), kHeads, 3, true).to(at::kBFloat16);
  const int threads = at::get_num_threads();
  std::vector<Result> results;
  for (const int count : {1, 2, 2, 3}) {
    at::set_num_threads(count);
    results.push_back(
        run_cut(trie, samples, {100, 149, 170, 250}, inputs, kHeads.scale(), kNativeBf16));
  }
  at::set_num_threads(threads);
  for (const Result& result : results) {
    EXPECT_TRUE(same_bits(result.out, results[0].out));
    EXPECT_TRUE(same_bits(result.dq, results[0].dq));
    EXPECT_TRUE(same_bits(result.dk, results[0].dk));
    EXPECT_TRUE(same_bits(result.dv, results[0].dv));
  }
}

TEST(Carry, ASecondForwardLeavesTheStoreAndGivesTheSameBits) {
  const std::vector<Sample> samples = fork_samples(70, {40, 30});
  const trie::Trie trie = trie::build(samples);
  const Inputs inputs = random_inputs(trie.num_tokens(), kHeads, 3, true).to(at::kBFloat16);
  auto blocks = cut(trie, samples, {50, 100});
  const auto forward = [&](size_t b) {
    const Inputs part = inputs.select(blocks[b]->own());
    TrieAttention context(blocks[b]->trie, kNativeBf16, blocks[b]->carry);
    return context.forward(0, part.q, part.k, part.v, kHeads.scale(), nullptr);
  };
  const at::Tensor first = forward(0);
  const at::Tensor second = forward(1);
  EXPECT_EQ(blocks[0]->store.bytes(), 2 * 50 * 3 * 64 * 2);
  const at::Tensor kept = blocks[1]->store.k[0];
  EXPECT_TRUE(same_bits(forward(1), second));
  EXPECT_TRUE(same_bits(forward(0), first));
  EXPECT_TRUE(kept.is_same(blocks[1]->store.k[0]));
  EXPECT_FALSE(blocks[0]->store.has_gradient(0));
  blocks[0]->store.ensure_gradient(0);
  EXPECT_EQ(blocks[0]->store.bytes(), 2 * 50 * 3 * 64 * (2 + 4));
}

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Carry, WrongCarriesNameWhatWasWanted) {
  const trie::Trie trie = trie::build(fork_samples(3, {2, 2}));
  CarryStore store;
  const auto error = [&](BlockCarry carry) {
    return error_of([&] { TrieAttention(trie, kNativeBf16, std::move(carry)); });
  };
  EXPECT_EQ(error({.num_carried = 3, .sources = {{&store, 3}}}), "");
  EXPECT_EQ(error({.num_carried = 6, .sources = {{&store, 6}}}),
            "[carry] carried token 5: wanted a path, so the parent 4, got 2");
  EXPECT_EQ(error({.num_carried = 9}), "[carry] carried tokens: wanted 0 .. 7, got 9");
  EXPECT_EQ(error({.num_carried = 3, .sources = {{&store, 2}}}),
            "[carry] sources: wanted counts that sum to 3 carried tokens, got 2");
  EXPECT_EQ(error({.num_carried = 3, .sources = {{nullptr, 3}}}),
            "[carry] source: wanted a store and a count >= 1, got 3");
  EXPECT_EQ(error({.offered = {0, 1}}), "[carry] offered: wanted a store for 2 tokens");
  EXPECT_EQ(error({.num_carried = 3, .sources = {{&store, 3}}, .offered = {2}, .out = &store}),
            "[carry] offered: wanted own tokens in ascending order, got 2 after 2");
  const Inputs inputs = random_inputs(4, kSmallHeads, 1, true).to(at::kBFloat16);
  TrieAttention early(trie, kNativeBf16, {.num_carried = 3, .sources = {{&store, 3}}});
  EXPECT_NE(error_of([&] {
              early.forward(0, inputs.q, inputs.k, inputs.v, 1.0, nullptr);
            }).find("[trie_attention] carried keys of layer 0: wanted 3 rows like k [4, 2, 16]"),
            std::string::npos);
}

}  // namespace
}  // namespace banyan::ops
