// Paged attention: the bits of trie attention whatever the chunks and whoever shares the pages.
#include "banyan/ops/paged_attention.h"

#include <ATen/Parallel.h>
#include <ATen/ops/all.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "banyan/ops/attention_reference.h"
#include "banyan/ops/attention_test_util.h"

namespace banyan::ops {
namespace {

using namespace attention_test;

const ComputeOptions kNativeBf16{at::kBFloat16, at::kCPU, Kernels::kNative};
const ComputeOptions kDouble{at::kDouble, at::kCPU, Kernels::kAten};
const ComputeOptions kFloat{at::kFloat, at::kCPU, Kernels::kAten};

std::vector<int32_t> pages_for(int32_t positions, int32_t first_page) {
  std::vector<int32_t> pages;
  for (int32_t p = 0; p < positions; p += kPathTile) {
    pages.push_back(first_page + p / static_cast<int32_t>(kPathTile));
  }
  return pages;
}

// Feeds one sequence in chunks of `chunk` tokens (0: all at once), then single tokens from
// `decode_from`.
at::Tensor feed(KvPool& pool,
                const Inputs& sequence,
                const std::vector<int32_t>& pages,
                int64_t chunk,
                int64_t decode_from,
                double scale,
                at::Tensor* lse) {
  const int64_t length = sequence.q.size(0);
  std::vector<at::Tensor> outs;
  std::vector<at::Tensor> lses;
  for (int64_t at = 0; at < length;) {
    const int64_t step = at >= decode_from ? 1 : (chunk == 0 ? decode_from : chunk);
    const int64_t stop = std::min(at + step, at < decode_from ? decode_from : length);
    PagedRun run;
    run.num_tokens = static_cast<int32_t>(stop - at);
    run.first_position = static_cast<int32_t>(at);
    run.pages = pages;
    PagedAttention attention(pool, {run});
    at::Tensor part;
    outs.push_back(attention.forward(0,
                                     sequence.q.slice(0, at, stop),
                                     sequence.k.slice(0, at, stop),
                                     sequence.v.slice(0, at, stop),
                                     scale,
                                     &part));
    lses.push_back(part);
    at = stop;
  }
  if (lse != nullptr) *lse = at::cat(lses, 0);
  return at::cat(outs, 0);
}

TEST(PagedAttention, ChunksAndDecodeGiveTheBitsOfTrieAttention) {
  for (const Heads& heads : {Heads{9, 3, 64}, Heads{4, 2, 16}, Heads{14, 2, 8}}) {
    for (const int32_t length : {1, 63, 64, 65, 150}) {
      const trie::Trie trie = trie::build(fork_samples(length, {0}));
      const Inputs inputs = random_inputs(length, heads, 3, true).to(at::kBFloat16);
      TrieAttention training(trie, kNativeBf16);
      at::Tensor wanted_lse;
      const at::Tensor wanted =
          training.forward(0, inputs.q, inputs.k, inputs.v, heads.scale(), &wanted_lse);
      for (const int64_t chunk : {1, 7, 64, 0}) {
        for (const int64_t decode_from : {length, std::max(1, length - 20)}) {
          KvPool pool(1, heads.kv_heads, heads.dim, 8, kNativeBf16);
          pool.layer(0).fill_(NAN);  // what an earlier owner may have left
          at::Tensor lse;
          const at::Tensor got =
              feed(pool, inputs, pages_for(length, 2), chunk, decode_from, heads.scale(), &lse);
          EXPECT_TRUE(same_bits(got, wanted)) << length << " in chunks of " << chunk;
          EXPECT_TRUE(same_bits(lse, wanted_lse)) << length << " in chunks of " << chunk;
        }
      }
    }
  }
}

struct Siblings {
  std::vector<Inputs> sequences;  // a common trunk, then own tokens
  int32_t trunk;
};

Siblings make_siblings(const Heads& heads, int32_t trunk, const std::vector<int32_t>& suffixes) {
  Siblings result;
  result.trunk = trunk;
  const Inputs common = random_inputs(trunk, heads, 1, true).to(at::kBFloat16);
  for (size_t s = 0; s < suffixes.size(); ++s) {
    const Inputs own = random_inputs(suffixes[s], heads, 10 + s, true).to(at::kBFloat16);
    result.sequences.push_back({at::cat({common.q, own.q}, 0),
                                at::cat({common.k, own.k}, 0),
                                at::cat({common.v, own.v}, 0),
                                at::cat({common.grad_out, own.grad_out}, 0)});
  }
  return result;
}

// One decode step for all sequences at `position`, in one batch; returns the rows.
at::Tensor decode_together(KvPool& pool,
                           const Siblings& siblings,
                           const std::vector<std::vector<int32_t>>& pages,
                           int32_t position,
                           double scale) {
  std::vector<PagedRun> runs;
  std::vector<at::Tensor> q, k, v;
  for (size_t s = 0; s < siblings.sequences.size(); ++s) {
    runs.push_back({.num_tokens = 1, .first_position = position, .pages = pages[s]});
    q.push_back(siblings.sequences[s].q.slice(0, position, position + 1));
    k.push_back(siblings.sequences[s].k.slice(0, position, position + 1));
    v.push_back(siblings.sequences[s].v.slice(0, position, position + 1));
  }
  PagedAttention attention(pool, runs);
  return attention.forward(0, at::cat(q, 0), at::cat(k, 0), at::cat(v, 0), scale, nullptr);
}

TEST(PagedAttention, SiblingsOnSharedPagesEqualPrivatePages) {
  const Heads heads{9, 3, 64};
  const int32_t trunk = 150;  // two whole pages and a tail that is copied on write
  const int32_t own = 50;
  const Siblings siblings = make_siblings(heads, trunk, std::vector<int32_t>(40, own));
  KvPool pool(1, heads.kv_heads, heads.dim, 3 + 40 * 3, kNativeBf16);
  // The trunk once, by the first sibling; every sibling gets a copy of the tail page.
  const Inputs& first = siblings.sequences[0];
  PagedAttention prefill(pool, {{.num_tokens = trunk, .first_position = 0, .pages = {0, 1, 2}}});
  prefill.forward(0,
                  first.q.slice(0, 0, trunk),
                  first.k.slice(0, 0, trunk),
                  first.v.slice(0, 0, trunk),
                  heads.scale(),
                  nullptr);
  std::vector<std::vector<int32_t>> pages;
  for (int32_t s = 0; s < 40; ++s) {
    pages.push_back({0, 1, 3 + 3 * s, 4 + 3 * s});
    pool.copy_page(2, 3 + 3 * s);
  }
  std::vector<at::Tensor> together;
  for (int32_t i = 0; i < own; ++i) {
    together.push_back(decode_together(pool, siblings, pages, trunk + i, heads.scale()));
  }
  for (const int32_t s : {0, 17, 39}) {
    KvPool alone(1, heads.kv_heads, heads.dim, 4, kNativeBf16);
    const at::Tensor wanted =
        feed(alone, siblings.sequences[s], {3, 1, 0, 2}, 0, trunk + own, heads.scale(), nullptr);
    for (int32_t i = 0; i < own; ++i) {
      EXPECT_TRUE(same_bits(together[i].select(0, s), wanted.select(0, trunk + i)))
          << "sibling " << s << " token " << i;
    }
  }
}

TEST(PagedAttention, MixedBatchesAndThreadsGiveEqualBits) {
  const Heads heads{4, 2, 16};
  const Siblings siblings = make_siblings(heads, 100, {30, 7, 1});
  const auto all = [&](int threads) {
    at::set_num_threads(threads);
    KvPool pool(2, heads.kv_heads, heads.dim, 9, kNativeBf16);
    std::vector<PagedRun> runs;
    std::vector<at::Tensor> q, k, v;
    for (size_t s = 0; s < siblings.sequences.size(); ++s) {
      const Inputs& sequence = siblings.sequences[s];
      const auto length = static_cast<int32_t>(sequence.q.size(0));
      runs.push_back({length, 0, pages_for(length, static_cast<int32_t>(3 * s))});
      q.push_back(sequence.q);
      k.push_back(sequence.k);
      v.push_back(sequence.v);
    }
    PagedAttention attention(pool, runs);
    return attention.forward(1, at::cat(q, 0), at::cat(k, 0), at::cat(v, 0), 0.25, nullptr);
  };
  const int threads = at::get_num_threads();
  const at::Tensor one = all(1);
  const at::Tensor two = all(2);
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bits(one, two));
  KvPool alone(1, heads.kv_heads, heads.dim, 4, kNativeBf16);
  const at::Tensor second = feed(alone, siblings.sequences[1], {2, 0}, 0, 107, 0.25, nullptr);
  EXPECT_TRUE(same_bits(second, one.slice(0, 130, 237)));
}

TEST(PagedAttention, AtenEqualsTheReference) {
  const Heads heads{4, 2, 10};
  const Inputs inputs = random_inputs(150, heads, 4, /*exact=*/false);
  const AttentionReference wanted =
      attention_reference(inputs.q, inputs.k, inputs.v, heads.scale());
  for (const ComputeOptions& options : {kDouble, kFloat}) {
    KvPool pool(1, heads.kv_heads, heads.dim, 5, options);
    at::Tensor lse;
    const at::Tensor got =
        feed(pool, inputs.to(options.dtype), {4, 0, 2}, 37, 140, heads.scale(), &lse);
    const double tolerance = options.dtype == at::kDouble ? 1e-13 : 2e-6;
    EXPECT_LE(relative_error(got, wanted.out), tolerance);
    EXPECT_LE(relative_error(lse, wanted.lse), tolerance);
  }
}

TEST(PagedAttention, CopiedPagesKeepAllLayers) {
  for (const ComputeOptions& options : {kNativeBf16, kFloat}) {
    KvPool pool(2, 2, 16, 3, options);
    EXPECT_EQ(pool.page_bytes(), 2 * 2 * 2 * 64 * 16 * (options.dtype == at::kFloat ? 4 : 2));
    for (const int64_t layer : {0, 1}) {
      pool.layer(layer).zero_();
      pool.layer(layer).select(0, 1).fill_(static_cast<double>(layer + 1));
    }
    pool.copy_page(1, 2);
    for (const int64_t layer : {0, 1}) {
      EXPECT_EQ(pool.layer(layer).select(0, 2).min().item<double>(), layer + 1.0);
      EXPECT_EQ(pool.layer(layer).select(0, 0).max().item<double>(), 0.0);
    }
  }
}

TEST(PagedAttention, SpilledPagesComeBack) {
  for (const ComputeOptions& options : {kNativeBf16, kFloat}) {
    KvPool pool(2, 2, 16, 3, options);
    for (const int64_t layer : {0, 1}) {
      pool.layer(layer).zero_();
      pool.layer(layer).select(0, 1).fill_(static_cast<double>(layer + 1));
    }
    pool.spill_page(1, 4);
    pool.spill_page(0, 0);
    for (const int64_t layer : {0, 1}) pool.layer(layer).fill_(7.0);
    pool.restore_page(4, 2);
    pool.restore_page(0, 1);
    for (const int64_t layer : {0, 1}) {
      EXPECT_TRUE(pool.layer(layer).select(0, 0).eq(7.0).all().item<bool>());
      EXPECT_TRUE(pool.layer(layer).select(0, 1).eq(0.0).all().item<bool>());
      EXPECT_TRUE(pool.layer(layer).select(0, 2).eq(layer + 1.0).all().item<bool>());
    }
    EXPECT_THROW(pool.restore_page(3, 0), std::logic_error);  // nothing was spilled there
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

TEST(PagedAttention, WrongRunsNameWhatWasWanted) {
  KvPool pool(1, 2, 16, 3, kNativeBf16);
  const auto make = [&](const PagedRun& run) {
    return error_of([&] { PagedAttention attention(pool, {run}); });
  };
  EXPECT_EQ(make({1, 64, {0, 2}}), "");
  EXPECT_EQ(make({0, 3, {0}}),
            "[paged_attention] run: wanted >= 1 token at a position >= 0, got 0 at 3");
  EXPECT_EQ(make({2, 63, {0}}),
            "[paged_attention] pages of a run: wanted 2 for 65 positions, got 1");
  EXPECT_EQ(make({1, 0, {3}}), "[paged_attention] page: wanted 0 .. 2, got 3");
  EXPECT_EQ(error_of([] { KvPool none(1, 2, 16, 0, kNativeBf16); }),
            "[kv_pool] layers, kv heads, head_dim, pages: wanted >= 1 each, got 1, 2, 16, 0");
  PagedAttention attention(pool, {{1, 0, {0}}});
  const Inputs other = random_inputs(1, {4, 1, 16}, 1, true).to(at::kBFloat16);
  EXPECT_EQ(error_of([&] { attention.forward(0, other.q, other.k, other.v, 1.0, nullptr); }),
            "[paged_attention] k: wanted the pool's kv heads and head_dim 2, 16, got [1, 1, 16]");
  const at::Tensor none;
  EXPECT_THROW(attention.backward(0, none, none, none, none, none, none, 1.0), std::logic_error);
}

TEST(PagedAttention, AnEmptyBatchGivesEmptyTensors) {
  KvPool pool(1, 2, 16, 3, kNativeBf16);
  PagedAttention attention(pool, {});
  const Inputs none = random_inputs(0, {4, 2, 16}, 1, true).to(at::kBFloat16);
  EXPECT_EQ(attention.forward(0, none.q, none.k, none.v, 1.0, nullptr).numel(), 0);
}

}  // namespace
}  // namespace banyan::ops
