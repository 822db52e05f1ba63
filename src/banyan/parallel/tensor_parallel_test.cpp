#include "banyan/parallel/tensor_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "banyan/core/error.h"
#include "banyan/parallel/cut_head.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/testing/thread_transport.h"

namespace banyan::parallel {
namespace {

constexpr DecoderSizes kSizes = {
    .heads = 6, .kv_heads = 3, .head_dim = 4, .intermediate = 11, .vocab = 13};

double relative(const at::Tensor& a, const at::Tensor& b) {
  const double norm = b.to(at::kDouble).norm().item<double>();
  return a.to(at::kDouble).sub(b.to(at::kDouble)).norm().item<double>() / std::max(norm, 1e-30);
}

}  // namespace

TEST(TensorParallel, PartsCoverAllOnceAndDifferByOneAtMost) {
  for (const int64_t whole : {7, 8, 9, 64}) {
    for (const int64_t size : {1, 2, 3, 7}) {
      int64_t next = 0;
      for (int64_t rank = 0; rank < size; ++rank) {
        const Part part = even_part(whole, size, rank);
        EXPECT_EQ(part.begin, next);
        EXPECT_LE(part.count, even_part(whole, size, 0).count);
        EXPECT_GE(part.count, even_part(whole, size, 0).count - 1);
        next += part.count;
      }
      EXPECT_EQ(next, whole);
    }
  }
}

TEST(TensorParallel, QueryHeadsFollowTheirKvHeads) {
  testing::run_ranks(2, [](Collectives& ranks) {
    const TensorParallel tensor(ranks, false, kSizes);
    EXPECT_EQ(tensor.kv_heads().count, ranks.rank() == 0 ? 2 : 1);
    EXPECT_EQ(tensor.heads().begin, ranks.rank() == 0 ? 0 : 4);
    EXPECT_EQ(tensor.heads().count, 2 * tensor.kv_heads().count);
  });
  // One kv head, read by six query heads: both ranks hold it.
  testing::run_ranks(2, [](Collectives& ranks) {
    DecoderSizes sizes = kSizes;
    sizes.kv_heads = 1;
    const TensorParallel tensor(ranks, false, sizes);
    EXPECT_EQ(tensor.kv_heads().count, 1);
    EXPECT_EQ(tensor.heads().begin, 3 * ranks.rank());
    ParamTable table;
    table.add("model.layers.0.self_attn.k_proj.weight", at::zeros({4, 5}));
    table.add("model.norm.weight", at::zeros({5}));
    tensor.declare(table);
    EXPECT_EQ(table.params()[0].cut.begin, 0);
    EXPECT_EQ(table.params()[0].is_copy, ranks.rank() == 1);
    EXPECT_TRUE(table.params()[1].cut.is_whole());
    table.ensure_grads();
    table.params()[0].grad.fill_(ranks.rank() + 1.0);
    table.params()[1].grad.fill_(1.0);
    table.finish_grads();
    EXPECT_EQ(table.params()[0].grad[3][4].item<double>(), 3.0);
    EXPECT_EQ(table.params()[1].grad[0].item<double>(), 1.0);  // whole on each: not added
  });
}

TEST(TensorParallel, RowsAreSharedOutAndComeTogether) {
  for (const int64_t t : {1, 4, 5}) {
    testing::run_ranks(3, [t](Collectives& ranks) {
      const TensorParallel whole(ranks, false, kSizes);
      const TensorParallel sequence(ranks, true, kSizes);
      const at::Tensor x = at::arange(t * 2, at::kDouble).view({t, 2});
      const at::Tensor term = x * (ranks.rank() + 1.0);
      EXPECT_TRUE(whole.sum_rows(term.clone()).equal(x * 6.0));
      const at::Tensor own = sequence.sum_rows(term.clone());
      EXPECT_EQ(own.size(0), (t + 2) / 3);
      EXPECT_TRUE(sequence.gather_rows(own, t).equal(x * 6.0));
      EXPECT_TRUE(sequence.gather_rows(sequence.own_rows(x), t).equal(x));
      EXPECT_TRUE(sequence.own_rows(x * 6.0).equal(own));
    });
  }
}

TEST(TensorParallel, TheHeadOverACutVocabularyIsTheWholeOne) {
  constexpr int64_t kRows = 9, kWidth = 16, kVocab = 13, kEdges = 14;
  const ops::EdgeIndex index = {at::tensor({0, 1, 1, 3, 5, 6, 8, 10, 13, 14}, at::kInt),
                                at::randint(0, kVocab, {kEdges}, at::kInt)};
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const ComputeOptions options{.dtype = dtype};
    const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const double bound = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 2e-2;
    const at::Tensor master = at::randn({kVocab, kWidth}, wide);
    const at::Tensor hidden = at::randn({kRows, kWidth}, wide).to(dtype);
    const at::Tensor grad = at::randn({kEdges}, wide);
    const at::Tensor grad_entropy = at::randn({kRows}, wide);
    ops::LinearWeight head;
    ops::pack_weight(master, options, true, head);
    const ops::EdgeLogprob want =
        ops::edge_logprob_forward(hidden, head, index, 0.7, true, options);
    const at::Tensor squares = ops::sum_squared_probabilities(hidden, head, want.lse, 0.7, options);
    for (const bool with_entropy : {false, true}) {
      at::Tensor grad_head = at::zeros({kVocab, kWidth}, wide);
      const at::Tensor from_entropy = with_entropy ? grad_entropy : at::Tensor();
      const at::Tensor grad_hidden = ops::edge_logprob_backward(
          hidden, head, index, want, grad, from_entropy, 0.7, grad_head, options);
      testing::run_ranks(3, [&](Collectives& ranks) {
        const TensorParallel tensor(ranks, false, kSizes);
        const Part& own = tensor.vocab();
        ops::LinearWeight part;
        ops::pack_weight(master.narrow(0, own.begin, own.count).contiguous(), options, true, part);
        const ops::EdgeIndex edges = own_edges(tensor, index);
        ops::HeadMemory memory;
        const ops::EdgeLogprob got =
            edge_logprob_forward(tensor, hidden, part, edges, 0.7, true, options, &memory);
        EXPECT_LE(relative(got.logprob, want.logprob), bound);
        EXPECT_LE(relative(got.lse, want.lse), bound);
        EXPECT_LE(relative(got.entropy, want.entropy), bound);
        EXPECT_LE(relative(sum_squared_probabilities(tensor, hidden, part, got.lse, 0.7, options),
                           squares),
                  bound);
        at::Tensor grad_part = at::zeros({own.count, kWidth}, wide);
        const at::Tensor back = edge_logprob_backward(
            tensor, hidden, part, edges, got, grad, from_entropy, 0.7, grad_part, options, &memory);
        EXPECT_LE(relative(back, grad_hidden), bound);
        EXPECT_LE(relative(grad_part, grad_head.narrow(0, own.begin, own.count)), bound);
      });
    }
  }
}

TEST(TensorParallel, AWeightViewShowsTheWholeTensors) {
  const at::Tensor rows = at::arange(11 * 5, at::kFloat).view({11, 5});
  const at::Tensor columns = at::arange(5 * 11, at::kFloat).view({5, 11});
  const at::Tensor norm = at::arange(5, at::kFloat);
  testing::run_mesh(4, {.tp = 2}, [&](Groups& groups) {
    const TensorParallel tensor(groups.tensor, false, kSizes);
    const Part& own = tensor.intermediate();
    ParamTable table;
    table.add("model.layers.0.mlp.up_proj.weight",
              rows.narrow(0, own.begin, own.count).contiguous());
    table.add("model.layers.0.mlp.down_proj.weight",
              columns.narrow(1, own.begin, own.count).contiguous());
    table.add("model.norm.weight", norm.clone());
    tensor.declare(table);
    std::vector<at::Tensor> seen;
    WeightView(table, groups).each([&](const std::string&, const at::Tensor& whole) {
      seen.push_back(whole);
    });
    ASSERT_EQ(seen.size(), 3U);
    EXPECT_TRUE(seen[0].equal(rows));
    EXPECT_TRUE(seen[1].equal(columns));
    EXPECT_TRUE(seen[2].equal(norm));
  });
}

// A model that is filled from them is done with a layer before the next.
TEST(TensorParallel, AWeightViewShowsTheExpertsOfALayerTogether) {
  testing::run_mesh(4, {.ep = 2, .pp = 2}, [](Groups& groups) {
    const int64_t holder = groups.expert.rank();
    ParamTable table;
    for (const char* layer : {"0", "1"}) {
      const std::string prefix =
          "stage" + std::to_string(groups.pipeline.rank()) + "." + layer + ".";
      table.set_unit(layer[0] - '0' + 1);
      table.add(prefix + "norm", at::ones({3}));
      table.add(prefix + "expert" + std::to_string(holder), at::full({2}, holder, at::kFloat));
      table.params().back().is_dealt = true;
    }
    std::vector<std::string> names;
    WeightView(table, groups).each([&](const std::string& name, const at::Tensor& whole) {
      names.push_back(name);
      if (name.ends_with("norm")) return;
      EXPECT_TRUE(whole.equal(at::full({2}, name.back() - '0', at::kFloat))) << name;
    });
    std::vector<std::string> wanted;
    for (const char* layer : {"stage0.0.", "stage0.1.", "stage1.0.", "stage1.1."}) {
      for (const char* tensor : {"norm", "expert0", "expert1"}) {
        wanted.push_back(std::string(layer) + tensor);
      }
    }
    EXPECT_EQ(names, wanted);
  });
}

TEST(TensorParallel, TokensBeyondTheVocabularyAreRefused) {
  testing::run_ranks(2, [](Collectives& ranks) {
    const TensorParallel tensor(ranks, false, kSizes);
    EXPECT_THROW(tensor.own_tokens(at::tensor({0, 13}, at::kInt)), std::invalid_argument);
    EXPECT_THROW(tensor.own_tokens(at::tensor({-1}, at::kInt)), std::invalid_argument);
    EXPECT_EQ(tensor.own_tokens(at::zeros({0}, at::kInt)).ids.numel(), 0);
  });
}

}  // namespace banyan::parallel
