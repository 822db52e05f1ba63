// The ops through their slots: what is registered is called forward and backward, a wrapper that
// passes everything on changes no bit, removing restores the original's bits.
#include "banyan/ops/slots.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include "banyan/ops/paged_attention.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/trie/trie.h"

namespace banyan::ops {
namespace {

const ComputeOptions kNative{at::kBFloat16, at::kCPU, Kernels::kNative};
const ComputeOptions kDouble{at::kDouble, at::kCPU, Kernels::kAten};

at::Tensor normal(at::IntArrayRef sizes, uint64_t seed, const ComputeOptions& options) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble).to(options.dtype);
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

// Leaves the slots as they were.
class Slots : public ::testing::Test {
 protected:
  void TearDown() override {
    slot_table().remove_all();
    slot_table().apply();
  }
};

// Counts calls and passes them on: every std::function of an op becomes one that counts.
template <typename R, typename... A>
void count_calls(std::function<R(A...)>& function, int64_t& calls) {
  function = [inner = function, &calls](A... arguments) -> R {
    ++calls;
    return inner(std::forward<A>(arguments)...);
  };
}

struct Counts {
  int64_t forward = 0;
  int64_t backward = 0;
};

template <typename Op>
void count(feature::OpSlot<Op>& slot, Counts& counts) {
  slot.wrap("test", "count", [&counts](const Op& inner) {
    Op op = inner;
    count_calls(op.forward, counts.forward);
    count_calls(op.backward, counts.backward);
    return op;
  });
  slot.apply();
}

// --- every op: counted calls, unchanged bits ---

// All results of one forward and backward of every op but attention.
std::vector<at::Tensor> all_ops(const ComputeOptions& options) {
  const auto wide = options.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto x = normal({5, 8}, 1, options);
  const auto dy = normal({5, 8}, 2, options);
  const auto scale = normal({8}, 3, options);
  std::vector<at::Tensor> out;
  at::Tensor grad_scale = at::zeros({8}, wide);
  out.push_back(rms_norm_forward(x, scale, 1e-5, options));
  out.push_back(rms_norm_backward(dy, x, scale, 1e-5, grad_scale, options, dy));
  out.push_back(grad_scale);

  const auto heads = normal({5, 2, 4}, 4, options);
  const auto positions = at::arange(5, at::kInt);
  const auto angle = at::arange(10, wide).view({5, 2});
  out.push_back(rope_forward(heads, positions, angle.cos(), angle.sin(), options));
  out.push_back(rope_backward(heads, positions, angle.cos(), angle.sin(), options));
  at::Tensor into = at::zeros_like(heads);
  rope_backward_into(heads, positions, angle.cos(), angle.sin(), options, into);
  out.push_back(into.clone());
  rope_forward_into(heads, positions, angle.cos(), angle.sin(), options, into);
  out.push_back(into.clone());

  out.push_back(swiglu_forward(x, options));
  const SwigluGradients act = swiglu_backward(dy.slice(1, 0, 4), x, options);
  out.insert(out.end(), {act.gate_up, act.y});

  LinearWeight weight;
  pack_weight(normal({6, 8}, 5, options).to(wide), options, /*with_backward=*/true, weight);
  at::Tensor grad = at::zeros({6, 8}, wide);
  const auto dz = normal({5, 6}, 6, options);
  out.push_back(linear_forward(x, weight, normal({6}, 7, options), dz));
  out.push_back(linear_backward_input(dz, weight));
  linear_backward_weight(dz, x, grad, at::Tensor(), options);
  const auto ids = at::tensor({1, 3, 1, 0, 5}, at::kInt);
  out.push_back(embedding_forward(ids, weight));
  embedding_backward(dy, ids, grad);

  const EdgeIndex index{at::tensor({0, 1, 1, 3, 4, 5}, at::kInt),
                        at::tensor({0, 5, 2, 2, 1}, at::kInt)};
  const EdgeLogprob edges = edge_logprob_forward(x, weight, index, 0.7, true, options);
  out.insert(out.end(), {edges.logprob, edges.lse, edges.entropy});
  out.push_back(edge_logprob_backward(
      x, weight, index, edges, edges.logprob.mul(0.1), edges.entropy.mul(0.3), 0.7, grad, options));
  const ValueHeadWeight head{normal({1, 8}, 8, options).to(wide), at::zeros({1}, wide)};
  at::Tensor grad_head = at::zeros({1, 8}, wide);
  out.push_back(value_head_forward(x, head));
  at::Tensor grad_bias = at::zeros({1}, wide);
  out.push_back(value_head_backward(x, head, out.back(), grad_head, grad_bias));
  out.insert(out.end(), {grad, grad_head, grad_bias});
  return out;
}

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
}

TEST_F(Slots, AWrapperThatPassesOnChangesNoBit) {
  for (const ComputeOptions& options : {kNative, kDouble}) {
    const std::vector<at::Tensor> before = all_ops(options);
    Counts norm, rope, swiglu, embedding, head, value;
    count(rms_norm_slot(), norm);
    count(rope_slot(), rope);
    count(swiglu_slot(), swiglu);
    count(embedding_slot(), embedding);
    count(cross_entropy_slot(), head);
    count(value_head_slot(), value);
    EXPECT_TRUE(is_body_changed());
    expect_same(all_ops(options), before);
    EXPECT_EQ(norm.forward, 1);
    EXPECT_EQ(norm.backward, 1);
    EXPECT_EQ(rope.forward, 2) << "the one that writes into a tensor goes through it too";
    EXPECT_EQ(rope.backward, 2);
    for (const Counts& counts : {swiglu, embedding, head, value}) {
      EXPECT_EQ(counts.forward, 1);
      EXPECT_EQ(counts.backward, 1);
    }
    EXPECT_EQ(slot_table().remove("test"), 6);
    slot_table().apply();
    EXPECT_FALSE(is_body_changed());
    expect_same(all_ops(options), before);
    EXPECT_EQ(norm.forward, 1) << "called after it was removed";
  }
}

TEST_F(Slots, LinearHasThreeParts) {
  Counts calls;
  int64_t weight_calls = 0;
  linear_slot().wrap("test", "count", [&](const LinearOp& inner) {
    LinearOp op = inner;
    count_calls(op.forward, calls.forward);
    count_calls(op.backward_input, calls.backward);
    count_calls(op.backward_weight, weight_calls);
    return op;
  });
  const std::vector<at::Tensor> before = all_ops(kNative);
  linear_slot().apply();
  expect_same(all_ops(kNative), before);
  EXPECT_EQ(calls.forward, 1);
  EXPECT_EQ(calls.backward, 1);
  EXPECT_EQ(weight_calls, 1);
}

TEST_F(Slots, AReplacementIsCalledInPlaceOfTheOriginal) {
  const auto x = normal({3, 8}, 1, kDouble);
  const auto double_of = [](const at::Tensor& y) { return y.mul(2.0); };
  SwigluOp op;
  op.forward = [&](const at::Tensor& gate_up, const ComputeOptions&) {
    const auto gate = gate_up.slice(1, 0, 4);
    return double_of(gate.mul(at::sigmoid(gate)).mul(gate_up.slice(1, 4)));
  };
  op.backward =
      [&](const at::Tensor& dy, const at::Tensor& gate_up, const ComputeOptions& options) {
        swiglu_slot();  // the original, by its own slot's rule, is not reachable from here
        const auto gate = gate_up.slice(1, 0, 4);
        return SwigluGradients{at::zeros_like(gate_up), op.forward(gate_up, options).mul(dy.sum())};
      };
  const at::Tensor own = swiglu_forward(x, kDouble);
  swiglu_slot().replace("test", op);
  EXPECT_TRUE(at::equal(swiglu_forward(x, kDouble), own)) << "before apply";
  swiglu_slot().apply();
  EXPECT_TRUE(at::allclose(swiglu_forward(x, kDouble), own.mul(2.0), 1e-12));
  EXPECT_EQ(swiglu_backward(own, x, kDouble).gate_up.abs().sum().item<double>(), 0.0);
}

TEST_F(Slots, AWrongResultNamesSlotAndOwner) {
  const auto x = normal({3, 8}, 1, kDouble);
  SwigluOp op;
  op.forward = [](const at::Tensor& gate_up, const ComputeOptions&) { return gate_up; };
  op.backward = [](const at::Tensor& dy, const at::Tensor& gate_up, const ComputeOptions&) {
    return SwigluGradients{gate_up.to(at::kFloat), dy};
  };
  swiglu_slot().replace("mine", op);
  swiglu_slot().apply();
  EXPECT_EQ(error_of([&] { swiglu_forward(x, kDouble); }),
            "[feature] swiglu of mine: wanted y [3, 4] Double on cpu, got [3, 8] Double on cpu");
  EXPECT_EQ(error_of([&] { swiglu_backward(x.slice(1, 0, 4), x, kDouble); }),
            "[feature] swiglu of mine: wanted d(gate_up) [3, 8] Double on cpu, got [3, 8] Float on "
            "cpu");
}

TEST_F(Slots, APackedWeightIsUnpackedForThoseWhoAsk) {
  const auto master = normal({6, 8}, 5, kNative).to(at::kFloat);
  for (const bool with_backward : {false, true}) {
    LinearWeight weight;
    pack_weight(master, kNative, with_backward, weight);
    EXPECT_TRUE(at::equal(plain_weight(weight), master.to(at::kBFloat16)));
  }
}

// --- attention ---

Sample sample(std::vector<int32_t> tokens) {
  Sample out;
  out.tokens = std::move(tokens);
  return out;
}

// Dense attention by the definition of AttentionCall, with autograd's formulas in plain tensors.
AttentionResult dense(const AttentionCall& call, at::Tensor* probabilities = nullptr) {
  const int64_t all = call.k.size(0);
  const int64_t own = call.q.size(0);
  const int64_t groups = call.q.size(1) / call.k.size(1);
  at::Tensor mask = at::zeros({all, all}, at::kDouble);
  for (int64_t t = 0; t < all; ++t) {
    for (int64_t at = t; at >= 0; at = call.parent[at].item<int32_t>()) mask[t][at] = 1.0;
  }
  const auto wide = [&](const at::Tensor& x) {
    return x.to(at::kDouble).repeat_interleave(groups, 1).transpose(0, 1);
  };
  const at::Tensor q = call.q.to(at::kDouble).transpose(0, 1);  // [H, T, D]
  at::Tensor scores = q.matmul(wide(call.k).transpose(1, 2)).mul(call.scale);
  scores = scores.masked_fill(mask.slice(0, all - own).eq(0.0), -1e30);
  const at::Tensor lse = scores.logsumexp({2});
  const at::Tensor p = scores.sub(lse.unsqueeze(2)).exp();
  if (probabilities != nullptr) *probabilities = p;
  const at::Tensor out = p.matmul(wide(call.v)).transpose(0, 1);
  return {out.to(call.q.scalar_type()).contiguous(),
          lse.transpose(0, 1).to(call.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)};
}

AttentionSlotGradients dense_backward(const AttentionCall& call, const at::Tensor& grad_out) {
  at::Tensor p;
  dense(call, &p);
  const int64_t kv = call.k.size(1);
  const int64_t groups = call.q.size(1) / kv;
  const auto wide = [&](const at::Tensor& x) {
    return x.to(at::kDouble).repeat_interleave(groups, 1).transpose(0, 1);
  };
  const auto narrow = [&](const at::Tensor& x) {  // [H, C + T, D] -> [C + T, K, D]
    return x.transpose(0, 1).reshape({x.size(1), kv, groups, x.size(2)}).sum({2});
  };
  const at::Tensor dy = grad_out.to(at::kDouble).transpose(0, 1);
  const at::Tensor dp = dy.matmul(wide(call.v).transpose(1, 2));
  const at::Tensor ds = p.mul(dp.sub(dp.mul(p).sum({2}, true))).mul(call.scale);
  const at::Tensor q = call.q.to(at::kDouble).transpose(0, 1);
  const auto like = call.q.scalar_type();
  return {ds.matmul(wide(call.k)).transpose(0, 1).to(like).contiguous(),
          narrow(ds.transpose(1, 2).matmul(q)).to(like),
          narrow(p.transpose(1, 2).matmul(dy)).to(like)};
}

struct Inputs {
  at::Tensor q, k, v, grad;
};

Inputs inputs(int64_t tokens, const ComputeOptions& options) {
  return {normal({tokens, 4, 8}, 1, options),
          normal({tokens, 2, 8}, 2, options),
          normal({tokens, 2, 8}, 3, options),
          normal({tokens, 4, 8}, 4, options)};
}

// Forward and backward of a trie in one block, or cut behind its first `cut` tokens, in two.
std::vector<at::Tensor> attend(const trie::Trie& trie, const ComputeOptions& options, int64_t cut) {
  const Inputs in = inputs(trie.num_tokens(), options);
  constexpr double kScale = 0.3;
  const auto run = [&](TrieAttention& attention, int64_t first, int64_t last, at::Tensor& lse) {
    return attention.forward(0,
                             in.q.slice(0, first, last),
                             in.k.slice(0, first, last),
                             in.v.slice(0, first, last),
                             kScale,
                             &lse);
  };
  const auto back = [&](TrieAttention& attention,
                        int64_t first,
                        int64_t last,
                        const at::Tensor& out,
                        const at::Tensor& lse) {
    return attention.backward(0,
                              in.grad.slice(0, first, last),
                              in.q.slice(0, first, last),
                              in.k.slice(0, first, last),
                              in.v.slice(0, first, last),
                              out,
                              lse,
                              kScale);
  };
  if (cut == 0) {
    TrieAttention attention(trie, options);
    at::Tensor lse;
    const at::Tensor out = run(attention, 0, trie.num_tokens(), lse);
    const AttentionGradients grads = back(attention, 0, trie.num_tokens(), out, lse);
    return {out, grads.dq, grads.dk, grads.dv};
  }
  // The first `cut` tokens are one path: they are the first block, and carried into the second.
  std::vector<int32_t> offered(cut);
  for (int64_t i = 0; i < cut; ++i) offered[i] = static_cast<int32_t>(i);
  const trie::Trie trunk =
      trie::build({sample(std::vector<int32_t>(trie.tok.begin(), trie.tok.begin() + cut))});
  CarryStore store;
  TrieAttention first(trunk, options, {.offered = offered, .out = &store});
  TrieAttention second(trie, options, {.num_carried = cut, .sources = {{&store, cut}}});
  at::Tensor lse1, lse2;
  const at::Tensor out1 = run(first, 0, cut, lse1);
  const at::Tensor out2 = run(second, cut, trie.num_tokens(), lse2);
  const AttentionGradients grads2 = back(second, cut, trie.num_tokens(), out2, lse2);
  const AttentionGradients grads1 = back(first, 0, cut, out1, lse1);
  return {at::cat({out1, out2}),
          at::cat({grads1.dq, grads2.dq}),
          at::cat({grads1.dk, grads2.dk}),
          at::cat({grads1.dv, grads2.dv})};
}

void replace_attention() {
  AttentionOp op;
  op.forward = [](const AttentionCall& call) { return dense(call); };
  op.backward = [](const AttentionCall& call,
                   const at::Tensor& grad_out,
                   const at::Tensor&,
                   const at::Tensor&) { return dense_backward(call, grad_out); };
  attention_slot().replace("dense", op);
  attention_slot().apply();
}

class AttentionSlot : public Slots {
 protected:
  // A trunk of three tokens and three branches.
  const trie::Trie trie_ =
      trie::build({sample({1, 2, 3, 4, 5}), sample({1, 2, 3, 6}), sample({1, 2, 3, 4, 7, 8})});
};

TEST_F(AttentionSlot, AReplacementHasTheOriginalsNumbersAlsoOverCutBlocks) {
  for (const int64_t cut : {0, 2, 3}) {
    const std::vector<at::Tensor> own = attend(trie_, kDouble, cut);
    replace_attention();
    const std::vector<at::Tensor> got = attend(trie_, kDouble, cut);
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(at::allclose(got[i], own[i], 1e-9, 1e-11)) << cut << " " << i;
      EXPECT_FALSE(at::equal(got[i], own[i]) && i == 1) << "is the replacement called at all?";
    }
    slot_table().remove_all();
    slot_table().apply();
    expect_same(attend(trie_, kDouble, cut), own);
  }
}

TEST_F(AttentionSlot, AWrapperThatPassesOnChangesNoBitAlsoOverCutBlocks) {
  for (const ComputeOptions& options : {kNative, kDouble}) {
    for (const int64_t cut : {0, 3}) {
      const std::vector<at::Tensor> own = attend(trie_, options, cut);
      Counts counts;
      count(attention_slot(), counts);
      expect_same(attend(trie_, options, cut), own);
      EXPECT_EQ(counts.forward, cut == 0 ? 1 : 2);
      EXPECT_EQ(counts.backward, counts.forward);
      slot_table().remove_all();
      slot_table().apply();
    }
  }
}

// The original with other keys than its own computes from those, carried ones too.
TEST_F(AttentionSlot, AWrapperMayChangeKeys) {
  attention_slot().wrap("test", "scaled", [](const AttentionOp& inner) {
    const auto scaled = [](AttentionCall call) {
      call.k = call.k.mul(0.5);
      return call;
    };
    AttentionOp op;
    op.forward = [=](const AttentionCall& call) { return inner.forward(scaled(call)); };
    op.backward = [=](const AttentionCall& call,
                      const at::Tensor& grad_out,
                      const at::Tensor& out,
                      const at::Tensor& lse) {
      AttentionSlotGradients grads = inner.backward(scaled(call), grad_out, out, lse);
      EXPECT_FALSE(grads.is_settled);
      grads.dk = grads.dk.mul(0.5);
      return grads;
    };
    return op;
  });
  attention_slot().apply();
  const std::vector<at::Tensor> whole = attend(trie_, kDouble, 0);
  const std::vector<at::Tensor> cut = attend(trie_, kDouble, 3);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(at::allclose(cut[i], whole[i], 1e-9, 1e-11)) << i;
  }
}

// Two runs over pages, the second behind 70 positions that an earlier pass wrote.
std::vector<at::Tensor> attend_pages(const ComputeOptions& options) {
  KvPool pool(1, 2, 8, 4, options);
  std::vector<at::Tensor> out;
  const std::vector<std::vector<PagedRun>> passes = {
      {{.num_tokens = 70, .first_position = 0, .pages = {0, 2}}},
      {{.num_tokens = 3, .first_position = 0, .pages = {1}},
       {.num_tokens = 2, .first_position = 70, .pages = {0, 2}}}};
  for (const std::vector<PagedRun>& runs : passes) {
    int64_t tokens = 0;
    for (const PagedRun& run : runs) tokens += run.num_tokens;
    const Inputs in = inputs(tokens, options);
    PagedAttention attention(pool, runs);
    out.push_back(attention.forward(0, in.q, in.k, in.v, 0.3, nullptr));
  }
  return out;
}

TEST_F(AttentionSlot, TheRolloutAttendsThroughItToo) {
  for (const ComputeOptions& options : {kDouble, kNative}) {
    const std::vector<at::Tensor> own = attend_pages(options);
    Counts counts;
    count(attention_slot(), counts);
    expect_same(attend_pages(options), own);
    EXPECT_EQ(counts.forward, 3) << "run by run";
    slot_table().remove_all();
    replace_attention();
    const std::vector<at::Tensor> got = attend_pages(options);
    const double tolerance = options.dtype == at::kDouble ? 1e-10 : 2e-2;
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(at::allclose(got[i], own[i], tolerance, tolerance)) << i;
    }
    slot_table().remove_all();
    slot_table().apply();
  }
}

TEST_F(AttentionSlot, AReplacementNeedNoLse) {
  replace_attention();
  AttentionOp op;
  op.forward = [](const AttentionCall& call) { return AttentionResult{dense(call).out, {}}; };
  op.backward = [](const AttentionCall& call,
                   const at::Tensor& grad_out,
                   const at::Tensor&,
                   const at::Tensor& lse) {
    EXPECT_FALSE(lse.defined());
    return dense_backward(call, grad_out);
  };
  attention_slot().replace("test", op, /*force=*/true);
  attention_slot().apply();
  attend(trie_, kDouble, 3);
}

}  // namespace
}  // namespace banyan::ops
