// Offload moves memory away between uses and changes no value.
#include "banyan/train/offload.h"

#include <gtest/gtest.h>

#include "banyan/core/memory.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/apply_gradients.h"

namespace banyan::train {
namespace {

using testing::ScratchDir;

OptimConfig optim_config() {
  OptimConfig optim = testing::tiny_config("", "").actor.optim;
  optim.weight_decay = 0.1;
  return optim;
}

struct Role {
  explicit Role(at::ScalarType dtype)
      : model(models::random_model(testing::tiny_config_json(), 3, {{.dtype = dtype}, true})),
        optimizer(std::make_unique<optim::AdamW>(model->params(), adamw_options(optim_config()))) {}

  void step(double gradient) {
    model->params().ensure_grads();
    for (Param& param : model->params().params()) {
      EXPECT_EQ(param.grad.abs().sum().item<double>(), 0.0) << param.name;
      param.grad.fill_(gradient).select(0, 0).fill_(-2.0 * gradient);
    }
    apply_gradients(optim_config(), 1e-2, /*loss=*/0.0, *model, *optimizer);
  }

  // Of everything that is offloaded.
  int64_t resident() {
    int64_t bytes = 0;
    const auto add = [&](const at::Tensor& x) {
      bytes += resident_bytes_of(x.const_data_ptr(), x.nbytes());
    };
    for (const Param& param : model->params().params()) {
      add(param.master);
      add(param.grad);
    }
    for (const at::Tensor& m : optimizer->first_moments()) add(m);
    for (const at::Tensor& v : optimizer->second_moments()) add(v);
    return bytes;
  }

  std::unique_ptr<models::CausalLM> model;
  std::unique_ptr<optim::AdamW> optimizer;
};

TEST(Offload, StepsGiveTheSameBitsAndLeaveNothingInMemory) {
  const ScratchDir scratch("offload");
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    Role plain(dtype);
    Role away(dtype);
    offload({.folder = scratch / "away", .masters = true, .gradients = true, .moments = true},
            *away.model,
            away.optimizer.get());
    EXPECT_EQ(away.resident(), 0);
    for (const double gradient : {0.5, -0.25, 0.125}) {
      plain.step(gradient);
      away.step(gradient);
      plain.model->params().zero_grads();
      EXPECT_EQ(away.resident(), 0);
    }
    for (size_t i = 0; i < plain.model->params().params().size(); ++i) {
      const Param& want = plain.model->params().params()[i];
      EXPECT_TRUE(away.model->params().params()[i].master.equal(want.master)) << want.name;
      EXPECT_TRUE(away.optimizer->first_moments()[i].equal(plain.optimizer->first_moments()[i]));
      EXPECT_TRUE(away.optimizer->second_moments()[i].equal(plain.optimizer->second_moments()[i]));
    }
    if (resident_bytes() > 0) {  // there is a /proc
      EXPECT_GT(away.resident(), 0);
    }
    EXPECT_TRUE(std::filesystem::is_empty(scratch / "away"));
  }
}

TEST(Offload, AReferenceIsOutOfMemoryBetweenItsPasses) {
  const ScratchDir scratch("offload");
  Role role(at::kBFloat16);
  const ops::LinearWeight& head = role.model->head();
  const at::Tensor before = head.packed.clone();
  offload({.folder = scratch / "away", .masters = true, .forms = true}, *role.model, nullptr);
  EXPECT_EQ(resident_bytes_of(head.packed.const_data_ptr(), head.packed.nbytes()), 0);
  EXPECT_TRUE(head.packed.equal(before));
  role.model->params().rest();
  EXPECT_EQ(resident_bytes_of(head.packed.const_data_ptr(), head.packed.nbytes()), 0);
  role.model->params().repack();
  EXPECT_TRUE(head.packed.equal(before));
}

TEST(Offload, WithoutAFolderOnlyGradientsMove) {
  Role role(at::kBFloat16);
  const void* master = role.model->params().params()[0].master.const_data_ptr();
  const OffloadOptions options{.masters = true, .gradients = true, .moments = true};
  offload(options, *role.model, role.optimizer.get());
  EXPECT_EQ(role.model->params().params()[0].master.const_data_ptr(), master);
  role.step(0.5);
  for (const Param& param : role.model->params().params()) {
    EXPECT_EQ(param.grad.abs().sum().item<double>(), 0.0) << param.name;
  }
  EXPECT_TRUE(wants_folder(options));
  EXPECT_FALSE(wants_folder({.gradients = true}));
}

TEST(Offload, EitherHomeOfAKeyIsEnough) {
  const FsdpConfig none = testing::tiny_config("", "").actor.fsdp;
  const MegatronConfig off{};
  EXPECT_FALSE(offload_of(none, off, {}).masters);
  FsdpConfig masters = none;
  masters.param_offload = true;
  EXPECT_TRUE(offload_of(masters, off, {}).masters);
  MegatronConfig megatron{};
  megatron.param_offload = true;
  EXPECT_TRUE(offload_of(none, megatron, {}).masters);
  megatron = {};
  megatron.grad_offload = true;
  EXPECT_TRUE(offload_of(none, megatron, {}).gradients);
  megatron = {};
  megatron.optimizer_offload = true;
  EXPECT_TRUE(offload_of(none, megatron, {}).moments);
  FsdpConfig everything = none;
  everything.offload_policy = true;
  const OffloadOptions all = offload_of(everything, off, "folder");
  EXPECT_TRUE(all.masters && all.gradients && all.moments);
  EXPECT_EQ(all.folder, "folder");
}

}  // namespace
}  // namespace banyan::train
