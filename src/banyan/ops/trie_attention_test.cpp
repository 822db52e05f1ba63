// Trie attention against dense attention per sample: values, gradients, bits.
#include "banyan/ops/trie_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "banyan/ops/attention_test_util.h"
#include "banyan/ops/detail/trie_index.h"
#include "banyan/testing/one_thread.h"
#include "banyan/testing/random_trie.h"

namespace banyan::ops {
namespace {

using namespace attention_test;

const ComputeOptions kNativeBf16{at::kBFloat16, at::kCPU, Kernels::kNative};
const ComputeOptions kAtenBf16{at::kBFloat16, at::kCPU, Kernels::kAten};
const ComputeOptions kDouble{at::kDouble, at::kCPU, Kernels::kAten};
const ComputeOptions kFloat{at::kFloat, at::kCPU, Kernels::kAten};

const std::vector<Heads> kHeads{{9, 3, 64}, {4, 2, 16}, {14, 2, 8}};

// `inputs` with the summed gradients of the samples.
Inputs with(Inputs inputs, const SampleGradients& gradients) {
  inputs.grad_out = gradients.packed;
  return inputs;
}

std::vector<testing::TrieCase> all_cases() {
  std::vector<testing::TrieCase> cases = testing::trie_cases(11, 97);
  cases.push_back({"tile_edges_0", fork_samples(63, {1, 64, 65, 2})});
  cases.push_back({"tile_edges_1", fork_samples(64, {1, 63, 64, 65})});
  cases.push_back({"tile_edges_2", fork_samples(65, {0, 1, 63, 62})});
  return cases;
}

TEST(TrieAttention, Fp64AndFp32EqualDensePerSample) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : all_cases()) {
    const trie::Trie trie = trie::build(c.samples);
    for (const Heads& heads : {kHeads[1], kHeads[2]}) {
      const Inputs inputs = random_inputs(trie.num_tokens(), heads, 5, /*exact=*/false);
      const SampleGradients gradients = random_gradients(trie, heads, 5);
      const Result wanted = dense_oracle(trie, inputs, gradients, heads.scale());
      for (const ComputeOptions& options : {kDouble, kFloat}) {
        TrieAttention attention(trie, options);
        const Result got = run(attention, with(inputs, gradients).to(options.dtype), heads.scale());
        const double tolerance = options.dtype == at::kDouble ? 1e-12 : 1e-5;
        EXPECT_LE(relative_error(got.out, wanted.out), tolerance) << c.name;
        EXPECT_LE(relative_error(got.lse, wanted.lse), tolerance) << c.name;
        EXPECT_LE(relative_error(got.dq, wanted.dq), tolerance) << c.name;
        EXPECT_LE(relative_error(got.dk, wanted.dk), tolerance) << c.name;
        EXPECT_LE(relative_error(got.dv, wanted.dv), tolerance) << c.name;
      }
    }
  }
}

TEST(TrieAttention, GradientsPassANumericCheck) {
  const testing::OneThread one_thread;
  const Heads heads{2, 1, 4};
  const trie::Trie trie = trie::build(fork_samples(3, {2, 3, 1}));
  const Inputs inputs = random_inputs(trie.num_tokens(), heads, 1, /*exact=*/false);
  TrieAttention attention(trie, kDouble);
  const Result got = run(attention, inputs, heads.scale());
  const auto loss = [&](const Inputs& at) {
    return attention.forward(0, at.q, at.k, at.v, heads.scale(), nullptr)
        .mul(inputs.grad_out)
        .sum()
        .item<double>();
  };
  const auto check = [&](at::Tensor Inputs::* which, const at::Tensor& gradient) {
    for (int64_t i = 0; i < gradient.numel(); ++i) {
      double sides[2];
      for (const int side : {0, 1}) {
        Inputs moved = inputs;
        moved.*which = (inputs.*which).clone();
        (moved.*which).data_ptr<double>()[i] += side == 0 ? -1e-6 : 1e-6;
        sides[side] = loss(moved);
      }
      EXPECT_NEAR((sides[1] - sides[0]) / 2e-6, gradient.data_ptr<double>()[i], 1e-7);
    }
  };
  check(&Inputs::q, got.dq);
  check(&Inputs::k, got.dk);
  check(&Inputs::v, got.dv);
}

TEST(TrieAttention, NativeIsCloseToTheOracleOnEveryCase) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : all_cases()) {
    const trie::Trie trie = trie::build(c.samples);
    for (const Heads& heads : kHeads) {
      const Inputs inputs = random_inputs(trie.num_tokens(), heads, 7, /*exact=*/true);
      // Gradients of packed tokens as the kernel gets them: rounded to bf16, then taken as exact.
      Inputs in_bf16 = inputs;
      in_bf16.grad_out = inputs.grad_out.to(at::kBFloat16).to(at::kDouble);
      TrieAttention native(trie, kNativeBf16);
      TrieAttention exact(trie, kDouble);
      const Result got = run(native, in_bf16.to(at::kBFloat16), heads.scale());
      const Result wanted = run(exact, in_bf16, heads.scale());
      EXPECT_LE(relative_error(got.out, wanted.out), 6e-3) << c.name;
      EXPECT_LE(relative_error(got.lse, wanted.lse), 1e-5) << c.name;
      EXPECT_LE(relative_error(got.dq, wanted.dq), 1.2e-2) << c.name;
      EXPECT_LE(relative_error(got.dk, wanted.dk), 1.2e-2) << c.name;
      EXPECT_LE(relative_error(got.dv, wanted.dv), 1.2e-2) << c.name;
    }
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A16 item 2.
TEST(TrieAttention, Bf16IsNoFurtherFromTheOracleThanDenseBf16) {
  const testing::OneThread one_thread;
  const Heads heads{9, 3, 64};
  const trie::Trie trie = trie::build(fork_samples(70, {40, 30, 65, 20, 33}));
  for (const ComputeOptions& options : {kNativeBf16, kAtenBf16}) {
    std::vector<double> out, dq, dk, dv;
    for (uint64_t seed = 0; seed < 5; ++seed) {
      const Inputs inputs = random_inputs(trie.num_tokens(), heads, seed, /*exact=*/true);
      const SampleGradients gradients = random_gradients(trie, heads, seed);
      const Result wanted = dense_oracle(trie, inputs, gradients, heads.scale());
      const Result dense = dense_bf16(trie, inputs, gradients, heads.scale());
      TrieAttention attention(trie, options);
      const Result shared =
          run(attention, with(inputs, gradients).to(at::kBFloat16), heads.scale());
      const auto ratio = [&](const at::Tensor Result::* which) {
        return relative_error(shared.*which, wanted.*which) /
               relative_error(dense.*which, wanted.*which);
      };
      out.push_back(ratio(&Result::out));
      dq.push_back(ratio(&Result::dq));
      dk.push_back(ratio(&Result::dk));
      dv.push_back(ratio(&Result::dv));
    }
    EXPECT_LE(median(out), 1.05);
    EXPECT_LE(median(dq), 1.05);
    EXPECT_LE(median(dk), 1.05);
    EXPECT_LE(median(dv), 1.05);
  }
}

// Rows of `inputs` (packed by `from`) in the packed order of `to`, whose sample s is from's sample
// samples[s].
std::vector<int32_t> repack(const trie::Trie& from,
                            const trie::Trie& to,
                            const std::vector<int32_t>& samples) {
  std::vector<int32_t> source(to.num_tokens(), -1);
  for (size_t s = 0; s < samples.size(); ++s) {
    const std::vector<int32_t> a = from.path(samples[s]);
    const std::vector<int32_t> b = to.path(static_cast<int32_t>(s));
    for (size_t i = 0; i < b.size(); ++i) source[b[i]] = a[i];
  }
  return source;
}

at::Tensor forward(const trie::Trie& trie, const Inputs& inputs, double scale) {
  TrieAttention attention(trie, kNativeBf16);
  return attention.forward(0, inputs.q, inputs.k, inputs.v, scale, nullptr);
}

TEST(TrieAttention, ForwardBitsDependOnThePathAlone) {
  for (const testing::TrieCase& c : all_cases()) {
    const trie::Trie shared = trie::build(c.samples);
    std::vector<int32_t> everyone(c.samples.size());
    for (size_t s = 0; s < everyone.size(); ++s) everyone[s] = static_cast<int32_t>(s);
    for (const Heads& heads : {kHeads[0], kHeads[2]}) {
      const Inputs inputs =
          random_inputs(shared.num_tokens(), heads, 3, /*exact=*/true).to(at::kBFloat16);
      const at::Tensor wanted = forward(shared, inputs, heads.scale());
      // Sharing off; then only every other sample; then the last sample alone.
      for (const int kind : {0, 1, 2}) {
        std::vector<int32_t> chosen;
        for (const int32_t s : everyone) {
          if (kind == 0 || (kind == 1 && s % 2 == 0) || (kind == 2 && s == everyone.back())) {
            chosen.push_back(s);
          }
        }
        std::vector<Sample> samples;
        for (const int32_t s : chosen) samples.push_back(c.samples[s]);
        const trie::Trie other = trie::build(samples, {.share = kind != 0});
        const std::vector<int32_t> source = repack(shared, other, chosen);
        const at::Tensor got = forward(other, inputs.select(source), heads.scale());
        EXPECT_TRUE(same_bits(got, wanted.index_select(0, index_of(source))))
            << c.name << " kind " << kind;
      }
    }
  }
}

TEST(TrieAttention, OtherBranchesDoNotTouchARow) {
  const Heads heads{9, 3, 64};
  const trie::Trie trie = trie::build(fork_samples(70, {40, 30, 65, 20}));
  const Inputs inputs = random_inputs(trie.num_tokens(), heads, 3, true).to(at::kBFloat16);
  const at::Tensor before = forward(trie, inputs, heads.scale());
  const std::vector<int32_t> mutated = trie.path(1);
  Inputs changed = inputs.select(trie.path(1));  // only to get fresh tensors of the right type
  changed = {inputs.q.clone(), inputs.k.clone(), inputs.v.clone(), inputs.grad_out.clone()};
  for (size_t i = 70; i < mutated.size(); ++i) {
    for (at::Tensor* x : {&changed.q, &changed.k, &changed.v}) x->select(0, mutated[i]).mul_(-3.0);
  }
  const at::Tensor after = forward(trie, changed, heads.scale());
  for (const int32_t sample : {0, 2, 3}) {
    const at::Tensor rows = index_of(trie.path(sample));
    EXPECT_TRUE(same_bits(before.index_select(0, rows), after.index_select(0, rows)));
  }
  const at::Tensor rows = index_of(mutated);
  EXPECT_FALSE(same_bits(before.index_select(0, rows), after.index_select(0, rows)));
}

TEST(TrieAttention, ANanReachesNoOtherBranch) {
  const Heads heads{4, 2, 16};
  const trie::Trie trie = trie::build(fork_samples(10, {5, 6, 7}));
  const Inputs inputs = random_inputs(trie.num_tokens(), heads, 3, true).to(at::kBFloat16);
  const int32_t bad = trie.path(1)[12];
  inputs.k.select(0, bad).fill_(NAN);
  inputs.v.select(0, bad).fill_(NAN);
  const at::Tensor out = forward(trie, inputs, heads.scale());
  for (int32_t t = 0; t < trie.num_tokens(); ++t) {
    const bool has_nan = out.select(0, t).isnan().any().item<bool>();
    if (trie.seg[t] != trie.seg[bad]) {
      EXPECT_FALSE(has_nan) << t;
    } else if (t >= bad) {
      EXPECT_TRUE(has_nan) << t;
    }
  }
}

// Neighbouring branches share tiles of queries, and their gradients stay apart.
TEST(TrieAttention, ANanReachesNoGradientOffItsPath) {
  const Heads heads{4, 2, 16};
  const trie::Trie trie = trie::build(fork_samples(10, {5, 6, 70, 7, 1, 1}));
  for (const int32_t sample : {0, 1, 2, 4}) {
    const Inputs inputs = random_inputs(trie.num_tokens(), heads, 3, true).to(at::kBFloat16);
    const int32_t bad = trie.path(sample).back();
    for (const at::Tensor& x : {inputs.q, inputs.k, inputs.v, inputs.grad_out}) {
      x.select(0, bad).fill_(NAN);
    }
    TrieAttention attention(trie, kNativeBf16);
    const Result got = run(attention, inputs, heads.scale());
    for (int32_t t = 0; t < trie.num_tokens(); ++t) {
      const bool on_path = t <= bad && bad < trie.tout[t];
      const auto has_nan = [&](const at::Tensor& x) {
        return x.select(0, t).isnan().any().item<bool>();
      };
      EXPECT_TRUE(on_path || !has_nan(got.dq)) << sample << ' ' << t;
      EXPECT_EQ(has_nan(got.dk), on_path) << sample << ' ' << t;
      EXPECT_EQ(has_nan(got.dv), on_path) << sample << ' ' << t;
    }
  }
}

TEST(TrieAttention, RepeatedRunsAndThreadCountsGiveEqualBits) {
  const Heads heads{9, 3, 64};
  const trie::Trie trie = trie::build(fork_samples(150, {40, 30, 65, 20, 1, 1, 128}));
  const Inputs inputs = random_inputs(trie.num_tokens(), heads, 3, true).to(at::kBFloat16);
  const int threads = at::get_num_threads();
  std::vector<Result> results;
  for (const int count : {1, 2, 2, 3}) {
    at::set_num_threads(count);
    TrieAttention attention(trie, kNativeBf16);
    results.push_back(run(attention, inputs, heads.scale()));
    results.push_back(run(attention, inputs, heads.scale()));
  }
  at::set_num_threads(threads);
  for (const Result& result : results) {
    EXPECT_TRUE(same_bits(result.out, results[0].out));
    EXPECT_TRUE(same_bits(result.lse, results[0].lse));
    EXPECT_TRUE(same_bits(result.dq, results[0].dq));
    EXPECT_TRUE(same_bits(result.dk, results[0].dk));
    EXPECT_TRUE(same_bits(result.dv, results[0].dv));
  }
}

TEST(TrieAttention, StridedInputsEqualContiguousOnes) {
  const Heads heads{4, 2, 16};
  const trie::Trie trie = trie::build(fork_samples(10, {5, 6, 7}));
  const Inputs inputs = random_inputs(trie.num_tokens(), heads, 3, true).to(at::kBFloat16);
  at::Tensor fused = at::empty({trie.num_tokens(), 8, 16}, at::kBFloat16);
  fused.slice(1, 0, 4).copy_(inputs.q);
  fused.slice(1, 4, 6).copy_(inputs.k);
  fused.slice(1, 6, 8).copy_(inputs.v);
  TrieAttention attention(trie, kNativeBf16);
  const Result a = run(attention, inputs, heads.scale());
  const Result b =
      run(attention,
          {fused.slice(1, 0, 4), fused.slice(1, 4, 6), fused.slice(1, 6, 8), inputs.grad_out},
          heads.scale());
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.dk, b.dk));
}

TEST(TrieAttention, AnEmptyTrieGivesEmptyTensors) {
  const trie::Trie trie = trie::build({});
  for (const ComputeOptions& options : {kNativeBf16, kDouble}) {
    TrieAttention attention(trie, options);
    const Inputs inputs = random_inputs(0, {4, 2, 16}, 1, false).to(options.dtype);
    const Result result = run(attention, inputs, 1.0);
    EXPECT_EQ(result.out.sizes(), inputs.q.sizes());
    EXPECT_EQ(result.dk.sizes(), inputs.k.sizes());
  }
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

TEST(TrieAttention, WrongInputsNameWhatWasWanted) {
  const trie::Trie trie = trie::build(fork_samples(3, {2}));
  TrieAttention attention(trie, kNativeBf16);
  const auto forward_of = [&](const Inputs& inputs) {
    return error_of([&] { attention.forward(0, inputs.q, inputs.k, inputs.v, 1.0, nullptr); });
  };
  const Inputs good = random_inputs(5, {4, 2, 16}, 1, true).to(at::kBFloat16);
  EXPECT_EQ(forward_of(good), "");
  EXPECT_EQ(forward_of(random_inputs(6, {4, 2, 16}, 1, true).to(at::kBFloat16)),
            "[trie_attention] q, k, v: wanted [5, heads, head_dim], got [6, 4, 16]");
  EXPECT_EQ(forward_of(good.to(at::kFloat)),
            "[trie_attention] q, k, v: wanted BFloat16, got Float");
  EXPECT_EQ(forward_of(random_inputs(5, {4, 3, 16}, 1, true).to(at::kBFloat16)),
            "[trie_attention] heads: wanted k and v alike and H a multiple of K, got q [5, 4, 16], "
            "k [5, 3, 16], v [5, 3, 16]");
  EXPECT_EQ(forward_of(random_inputs(5, {4, 2, 15}, 1, true).to(at::kBFloat16)),
            "[trie_attention] head_dim: wanted an even number for the native kernels, got 15");
  EXPECT_NE(error_of([&] {
              attention.backward(
                  0, good.grad_out, good.q, good.k, good.v, good.q, good.q.select(2, 0), 1.0);
            }).find("[trie_attention] lse: wanted what forward wrote"),
            std::string::npos);
}

TEST(TrieIndex, TilesInsideATrunkAreSharedAndForksAreNot) {
  const trie::Trie trie = trie::build(fork_samples(130, {3, 70}));
  const detail::TrieTiles tiles = detail::build_tiles(trie);
  // Trunk: 0..63, 64..127, 128..129; branch 0: 128..132; branch 1: 128..191, 192..199.
  EXPECT_EQ(tiles.list_offsets, (std::vector<int32_t>{0, 3, 6, 10}));
  EXPECT_EQ(tiles.lists, (std::vector<int32_t>{0, 1, 2, 0, 1, 3, 0, 1, 4, 5}));
  EXPECT_EQ(tiles.token_offsets, (std::vector<int32_t>{0, 64, 128, 130, 135, 199, 207}));
  const std::vector<int32_t> straddling(tiles.tokens.begin() + 130, tiles.tokens.begin() + 135);
  EXPECT_EQ(straddling, (std::vector<int32_t>{128, 129, 130, 131, 132}));
}

TEST(TrieIndex, ChunksListTheirSubtreesAndRunsTakeTurns) {
  const trie::Trie trie = trie::build(fork_samples(300, {3, 70}));
  const detail::TrieChunks chunks = detail::build_chunks(trie);
  std::vector<int32_t> begin, subtree_end;
  for (const kernels::TrieChunk& chunk : chunks.chunks) {
    begin.push_back(chunk.begin);
    subtree_end.push_back(chunk.subtree_end);
  }
  EXPECT_EQ(begin, (std::vector<int32_t>{0, 64, 128, 192, 256, 300, 303, 367}));
  // The short branch shares a tile of queries with the end of the trunk.
  EXPECT_EQ(chunks.tile_begins, (std::vector<int32_t>{0, 64, 128, 192, 256, 303, 367, 373}));
  EXPECT_EQ(subtree_end, (std::vector<int32_t>{373, 373, 373, 373, 373, 303, 373, 373}));
  std::vector<int32_t> first_chunk, first_tile, last_tile;
  for (const kernels::ChunkRun& run : chunks.runs) {
    first_chunk.push_back(run.first_chunk);
    first_tile.push_back(run.first_tile);
    last_tile.push_back(run.last_tile);
  }
  EXPECT_EQ(first_chunk, (std::vector<int32_t>{0, 4, 5, 6}));
  EXPECT_EQ(first_tile, (std::vector<int32_t>{0, 4, 4, 5}));
  EXPECT_EQ(last_tile, (std::vector<int32_t>{7, 7, 5, 7}));
  // Tiles 0 to 3 are seen by the first run alone, the others by the whole trunk and one branch.
  EXPECT_EQ(chunks.turns, (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2}));
  EXPECT_EQ(chunks.tile_turns, (std::vector<int32_t>{1, 1, 1, 1, 3, 3, 3}));
}

TEST(TrieIndex, CarriedTokensAreChunksWithoutQueries) {
  const trie::Trie trie = trie::build(fork_samples(70, {3, 70}));
  const detail::TrieChunks chunks = detail::build_chunks(trie, /*num_carried=*/68);
  EXPECT_EQ(chunks.first_own, 2);
  EXPECT_EQ(chunks.chunks[1].end, 68);
  EXPECT_EQ(chunks.chunks[2].begin, 68);
  EXPECT_EQ(chunks.tile_begins, (std::vector<int32_t>{0, 5, 69, 75}));  // 75 queries
  EXPECT_EQ(chunks.runs[0].last_chunk, 3);  // carried and own chunks of one path together
  EXPECT_EQ(chunks.runs[0].first_tile, 0);
  EXPECT_EQ(chunks.runs[0].last_tile, 3);
}

TEST(TrieIndex, EndsOfSamplesDoNotCutTilesOrChunks) {
  // Three turns of one chat, each a sample, then a second chat that leaves after the first turn.
  std::vector<Sample> samples(4);
  for (int32_t i = 0; i < 4; ++i) {
    samples[i].uid = i;
    samples[i].tokens.assign(i < 3 ? 40 * (i + 1) : 70, 1);
    for (size_t t = 40; t < samples[i].tokens.size(); ++t) samples[i].tokens[t] = i < 3 ? 2 : 3;
  }
  const trie::Trie trie = trie::build(samples);
  ASSERT_EQ(trie.num_segments(), 4);  // [0, 40) [40, 80) [80, 120) and [120, 150)
  const std::vector<detail::Chain> chains = detail::build_chains(trie);
  ASSERT_EQ(chains.size(), 3u);
  EXPECT_EQ(chains[1].begin, 40);
  EXPECT_EQ(chains[1].end, 120);
  EXPECT_EQ(chains[2].parent, 0);
  EXPECT_EQ(detail::build_tiles(trie).token_offsets,
            (std::vector<int32_t>{0, 40, 104, 160, 224, 230}));
  EXPECT_EQ(detail::build_chunks(trie).chunks.size(), 4u);
}

}  // namespace
}  // namespace banyan::ops
