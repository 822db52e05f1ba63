// A model of three parameters for checkpoint tests, and a run around it: no forward, no backward.
#pragma once

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>

#include <filesystem>
#include <string>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/core/error.h"
#include "banyan/io/test_support.h"

namespace banyan::checkpoint {

class ThreeParams final : public models::CausalLM {
 public:
  explicit ThreeParams(int64_t rows = 37) {
    table_.add("model.embed_tokens.weight", at::rand({rows, 8}).sub(0.5));
    table_.add("model.norm.weight", at::rand({8}).mul(1e-30));
    table_.add("model.layers.0.mlp.up_proj.weight", at::rand({16, 8}).mul(1e6));
    table_.on_repack([this] { ++num_repacks; });
  }
  const models::ModelShape& shape() const override { return shape_; }
  const ComputeOptions& options() const override { return options_; }
  ParamTable& params() override { return table_; }
  at::Tensor forward(const at::Tensor&,
                     const at::Tensor&,
                     AttentionContext&,
                     std::unique_ptr<models::Saved>*) override {
    BANYAN_ASSERT(false, "ThreeParams has no forward");
    return {};
  }
  void backward(std::unique_ptr<models::Saved>, const at::Tensor&, AttentionContext&) override {
    BANYAN_ASSERT(false, "ThreeParams has no backward");
  }
  models::HeadKind head_kind() const override { return models::HeadKind::kVocabulary; }
  const ops::ValueHeadWeight& value_head() const override { return value_head_; }
  at::Tensor& value_head_grad() override { return head_grad_; }
  at::Tensor value_head_bias_grad() const override { return {}; }
  const ops::LinearWeight& head() const override { return head_; }
  at::Tensor& head_grad() override { return head_grad_; }

  int num_repacks = 0;

 private:
  models::ModelShape shape_;
  ComputeOptions options_;
  ParamTable table_;
  ops::LinearWeight head_;
  ops::ValueHeadWeight value_head_;
  at::Tensor head_grad_;
};

// A run in a folder of its own: `step()` moves the weights, `save()` writes global_step_N.
class SmallRun {
 public:
  SmallRun() : optimizer(model.params(), {}) {
    std::filesystem::create_directory(source());
    io::write_bytes(source() + "/config.json",
                    R"({"model_type": "llama", "torch_dtype": "float32"})");
    io::write_bytes(source() + "/tokenizer.json", "{}");
    model.params().ensure_grads();
  }

  std::string source() const { return scratch / "source"; }
  std::string directory() const { return scratch / "run"; }
  std::string checkpoint(int64_t n) const {
    return directory() + "/global_step_" + std::to_string(n);
  }

  void step() {
    for (Param& param : model.params().params()) param.grad.copy_(at::rand(param.grad.sizes()));
    optimizer.step(1e-2, 1.0);
    ++state.global_step;
    state.extra = "{\"position\": " + std::to_string(10 * state.global_step) + "}";
  }
  void save(int64_t max_to_keep = 0) {
    checkpoint::save(directory(), model, optimizer, state, source(), max_to_keep);
  }

  io::TempDirectory scratch;
  ThreeParams model;
  optim::AdamW optimizer;
  TrainerState state;
};

}  // namespace banyan::checkpoint
