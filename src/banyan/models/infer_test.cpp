// The pass of the rollout has the bits of forward over a PagedAttention (its slow twin), on models
// of all shapes, for any mix of prompts and decodes, threads, grouping and rows wanted.
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "banyan/kernels/cpu/gemm.h"
#include "banyan/models/test_models.h"

namespace banyan::models {
namespace {

std::string config(const std::string& type, const std::string& fields) {
  return R"({"model_type": ")" + type + R"(", "rms_norm_eps": 1e-5, "initializer_range": 0.2,
    "max_position_embeddings": 512, )" +
         fields + "}";
}

// head_dim 64 and 128, one kv head for many, odd widths, gate and up that share a panel or do not,
// q/k norms, biases, tied or not.
std::vector<std::pair<std::string, std::string>> configs() {
  auto all = tiny_configs();
  all.emplace_back("smol", config("llama", R"("vocab_size": 300, "hidden_size": 192,
    "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": true)"));
  all.emplace_back("wide_heads", config("qwen3", R"("vocab_size": 131, "hidden_size": 96,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128)"));
  all.emplace_back("odd", config("qwen2", R"("vocab_size": 77, "hidden_size": 45,
    "intermediate_size": 71, "num_hidden_layers": 2, "num_attention_heads": 5,
    "num_key_value_heads": 5, "head_dim": 18, "tie_word_embeddings": true)"));
  all.emplace_back("biased", config("llama", R"("vocab_size": 90, "hidden_size": 70,
    "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "attention_bias": true, "mlp_bias": true)"));
  return all;
}

// Several sequences on one page of trunk, fed in random pieces.
class Feeder {
 public:
  Feeder(int64_t vocab, uint32_t seed) : random_(seed), vocab_(vocab) {}

  static constexpr int32_t kTrunk = 64;
  static constexpr int32_t kSequences = 9;
  static constexpr int32_t kPagesEach = 4;
  static constexpr int32_t kPages = 1 + kSequences * kPagesEach;

  // The next pass; the trunk first.
  void fill(ops::PagedBatch& batch) {
    batch.clear();
    if (!has_trunk_) {
      has_trunk_ = true;
      ops::PagedRun& run = batch.add_run();
      run.num_tokens = kTrunk;
      run.pages = {0};
      for (int32_t i = 0; i < kTrunk; ++i) batch.ids().push_back(token());
      for (int32_t s = 0; s < kSequences; ++s) done_[s] = kTrunk;
    } else {
      for (int32_t s = 0; s < kSequences; ++s) add_piece(batch, s);
    }
    std::vector<int32_t> rows(batch.num_tokens());
    std::iota(rows.begin(), rows.end(), 0);
    if (random_() % 3 > 0) {  // else all, in order
      std::shuffle(rows.begin(), rows.end(), random_);
      rows.resize(random_() % 2 == 0 ? rows.size() : random_() % (rows.size() + 1));
    }
    for (const int32_t row : rows) batch.want(row);
    batch.finish(kPages, vocab_);
  }

 private:
  int32_t token() { return static_cast<int32_t>(random_() % vocab_); }

  void add_piece(ops::PagedBatch& batch, int32_t s) {
    const int32_t kinds[] = {1, 1, 1, 2, 5, 70};
    const int32_t room = kTrunk * (1 + kPagesEach) - done_[s];
    const int32_t count = std::min(kinds[random_() % 6], room);
    if (count == 0 || (s > 0 && random_() % 5 == 0)) return;
    ops::PagedRun& run = batch.add_run();
    run.num_tokens = count;
    run.first_position = done_[s];
    run.pages = {0};
    for (int32_t p = 0; p < kPagesEach; ++p) run.pages.push_back(1 + s * kPagesEach + p);
    for (int32_t i = 0; i < count; ++i) batch.ids().push_back(token());
    done_[s] += count;
  }

  std::mt19937 random_;
  int64_t vocab_;
  bool has_trunk_ = false;
  int32_t done_[kSequences] = {};
};

std::unique_ptr<ops::KvPool> pool_for(CausalLM& model) {
  const ModelShape& shape = model.shape();
  return std::make_unique<ops::KvPool>(
      shape.layers, shape.kv_heads, shape.head_dim, Feeder::kPages, model.options());
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::equal(a.view(at::kShort), b.view(at::kShort));
}

TEST(Infer, HasTheBitsOfForward) {
  const int before = at::get_num_threads();
  for (const auto& [name, text] : configs()) {
    for (const bool with_backward : {false, true}) {
      std::optional<kernels::PortableGemm> portable;
      if (with_backward) portable.emplace();  // each way once
      const auto model = random_model(text, 5, {.compute = {}, .with_backward = with_backward});
      const auto fast = pool_for(*model);
      const auto slow = pool_for(*model);
      for (int64_t layer = 0; layer < model->shape().layers; ++layer) {
        fast->layer(layer).fill_(NAN);  // what an earlier owner may have left
      }
      Feeder feeder(model->shape().vocab, 11);
      ops::PagedBatch batch;
      for (int pass = 0; pass < 14; ++pass) {
        feeder.fill(batch);
        if (batch.num_tokens() == 0) continue;
        batch.set_grouped(pass % 3 != 1);
        at::set_num_threads(pass % 4 == 3 ? 1 : std::max(before, 2));
        const at::Tensor got = model->infer(*fast, batch);
        batch.set_grouped(true);
        const at::Tensor wanted = model->CausalLM::infer(*slow, batch);
        ASSERT_TRUE(same_bits(got, wanted))
            << name << ", pass " << pass << " of " << batch.num_tokens() << " tokens";
      }
    }
  }
  at::set_num_threads(before);
}

TEST(Infer, SteadyDecodingReturnsTheSameMemory) {
  const auto model =
      random_model(tiny_configs()[0].second, 5, {.compute = {}, .with_backward = false});
  const auto pool = pool_for(*model);
  ops::PagedBatch batch;
  std::set<const void*> seen;
  for (int32_t position = 0; position < 5; ++position) {
    batch.clear();
    for (int32_t s = 0; s < 3; ++s) {
      ops::PagedRun& run = batch.add_run();
      run.num_tokens = 1;
      run.first_position = position;
      run.pages = {s};
      batch.ids().push_back(position + s);
      batch.want(s);
    }
    batch.finish(Feeder::kPages, model->shape().vocab);
    seen.insert(model->infer(*pool, batch).const_data_ptr());
  }
  EXPECT_EQ(seen.size(), 1u);
}

// Processors without bf16 products: the same pass over the portable loop, equal to rounding.
TEST(Infer, PortableIsCloseToNative) {
  const auto model = random_model(configs()[6].second, 5, {.compute = {}, .with_backward = false});
  const auto native = pool_for(*model);
  const auto portable = pool_for(*model);
  Feeder feeder(model->shape().vocab, 11);
  ops::PagedBatch batch;
  for (int pass = 0; pass < 6; ++pass) {
    feeder.fill(batch);
    if (batch.num_wanted() == 0) continue;
    const at::Tensor got = model->infer(*native, batch).to(at::kFloat).clone();
    const kernels::PortableGemm scope;
    const at::Tensor wanted = model->infer(*portable, batch).to(at::kFloat);
    const double difference = got.sub(wanted).norm().item<double>();
    EXPECT_LT(difference, 0.03 * wanted.norm().item<double>()) << "pass " << pass;
  }
}

// fp32 goes through forward; a pass is a pass there too.
TEST(Infer, OtherTypesGoThroughForward) {
  const auto model = random_model(tiny_configs()[0].second, 5, {.compute = {.dtype = at::kFloat}});
  const auto pool = pool_for(*model);
  Feeder feeder(model->shape().vocab, 3);
  ops::PagedBatch batch;
  for (int pass = 0; pass < 3; ++pass) {
    feeder.fill(batch);
    if (batch.num_tokens() == 0) continue;
    const at::Tensor hidden = model->infer(*pool, batch);
    EXPECT_EQ(hidden.size(0), batch.num_wanted());
    EXPECT_EQ(hidden.scalar_type(), at::kFloat);
  }
}

TEST(Infer, ABatchIsChecked) {
  ops::PagedBatch batch;
  ops::PagedRun& run = batch.add_run();
  run.num_tokens = 2;
  run.pages = {0};
  batch.ids() = {1, 2};
  EXPECT_NO_THROW(batch.finish(1, 10));
  EXPECT_THROW(batch.finish(0, 10), std::invalid_argument);  // no such page
  EXPECT_THROW(batch.finish(1, 2), std::invalid_argument);   // no such token
  batch.ids() = {1};
  EXPECT_THROW(batch.finish(1, 10), std::invalid_argument);  // a token is missing
}

}  // namespace
}  // namespace banyan::models
