// FullyShardedModel: a loaded model cut over the processes of a run (parallel/fsdp.h), for tests
// and experiments that move the weights themselves.
#include <map>
#include <memory>

#include "banyan/core/error.h"
#include "banyan/nn/recompute.h"
#include "banyan/parallel/fsdp.h"
#include "banyan/train/sharded_model.h"
#include "convert.h"
#include "ranks.h"

namespace banyan::bindings {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

class FullyShardedModel {
 public:
  FullyShardedModel(models::CausalLM& model,
                    const py::object& ranks,
                    const train::Sharding& sharding)
      : groups_(groups_from(ranks)) {
    py::gil_scoped_release release;
    fsdp_ = train::shard_model(sharding, /*with_gradients=*/true, model, *groups_);
    BANYAN_CHECK(fsdp_ != nullptr, "[parallel] ranks: wanted more than one process, got one");
  }

  Tensors parts(at::Tensor Param::* which) const {
    Tensors out;
    for (const Param& part : fsdp_->parts().params()) out[part.name] = part.*which;
    return out;
  }
  Tensors whole(at::Tensor Param::* which) {
    py::gil_scoped_release release;
    std::vector<at::Tensor> pieces;
    for (const Param& part : fsdp_->parts().params()) pieces.push_back(part.*which);
    Tensors out;
    fsdp_->each_of(
        pieces, pieces[0].scalar_type(), [&](const Param& param, const at::Tensor& whole) {
          out[param.name] = whole.clone();
        });
    return out;
  }
  std::map<std::string, int64_t> sent_bytes() const { return parallel::sent_bytes(*groups_); }
  void changed() { fsdp_->changed(); }

 private:
  std::shared_ptr<parallel::Groups> groups_;
  std::unique_ptr<parallel::Fsdp> fsdp_;
};

}  // namespace

void bind_sharded(py::module_& module) {
  py::class_<FullyShardedModel>(
      module, "FullyShardedModel", "A model of which each process holds a part of every layer.")
      .def(py::init([](models::CausalLM& model,
                       const py::object& ranks,
                       bool reshard_after_forward,
                       bool forward_prefetch,
                       bool reduce_each_block,
                       int64_t recompute_layers) {
             if (recompute_layers > 0) {
               model.set_recompute(
                   {.method = nn::RecomputeMethod::kUniform, .num_layers = recompute_layers});
             }
             return std::make_unique<FullyShardedModel>(
                 model,
                 ranks,
                 train::Sharding{.cuts_weights = true,
                                 .reshard_after_forward = reshard_after_forward,
                                 .forward_prefetch = forward_prefetch,
                                 .reduce_each_block = reduce_each_block});
           }),
           py::arg("model"),
           py::arg("ranks"),
           py::arg("reshard_after_forward") = true,
           py::arg("forward_prefetch") = false,
           py::arg("reduce_each_block") = true,
           py::arg("recompute_layers") = 0,
           py::keep_alive<1, 2>(),
           "Takes the model's weights apart; `ranks` as train. With recompute_layers the update "
           "keeps "
           "the inputs of units of so many layers only.")
      .def(
          "parts",
          [](const FullyShardedModel& model) { return model.parts(&Param::master); },
          "Unit -> this process's part of its fp32 masters, 1-D (shared storage).")
      .def(
          "part_grads",
          [](const FullyShardedModel& model) { return model.parts(&Param::grad); },
          "Unit -> the gradients of that part, summed over the processes (shared storage).")
      .def("changed", &FullyShardedModel::changed, "Takes over parts that were changed in place.")
      .def(
          "params",
          [](FullyShardedModel& model) { return model.whole(&Param::master); },
          "Name -> whole fp32 master, a copy; all processes call it together.")
      .def(
          "grads",
          [](FullyShardedModel& model) { return model.whole(&Param::grad); },
          "Name -> whole gradient, a copy; all processes call it together.")
      .def("sent_bytes",
           &FullyShardedModel::sent_bytes,
           "\"group/operation\" -> bytes that this process has sent.");
}

}  // namespace banyan::bindings
