#include "banyan/train/offload.h"

#include <c10/core/StorageImpl.h>

#include <cstring>
#include <functional>
#include <memory>
#include <unordered_set>

#include "banyan/core/memory.h"
#include "banyan/core/spare_memory.h"

namespace banyan::train {
namespace {

using Storages = std::vector<c10::StorageImpl*>;

constexpr size_t kAlignment = 64;                // LibTorch's own
constexpr size_t kDropEvery = size_t{64} << 20;  // bytes touched between two drops

size_t padded(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t total_bytes(const Storages& storages) {
  size_t total = 0;
  for (const c10::StorageImpl* storage : storages) total += padded(storage->nbytes());
  return total;
}

void delete_holder(void* holder) { delete static_cast<std::shared_ptr<SpareMemory>*>(holder); }

// Storages laid out one after the other in spare memory, which lives as long as one lies in it.
class Placing {
 public:
  explicit Placing(std::shared_ptr<SpareMemory> memory) : memory_(std::move(memory)) {}

  std::byte* next() const { return memory_->data() + at_; }
  void place(c10::StorageImpl& storage) {
    storage.set_data_ptr_noswap(
        {next(), new std::shared_ptr<SpareMemory>(memory_), &delete_holder, storage.device()});
    at_ += padded(storage.nbytes());
  }

 private:
  std::shared_ptr<SpareMemory> memory_;
  size_t at_ = 0;
};

void move_into(const std::shared_ptr<SpareMemory>& memory, const Storages& storages) {
  Placing placing(memory);
  size_t copied = 0;
  for (c10::StorageImpl* storage : storages) {
    std::memcpy(placing.next(), storage->data(), storage->nbytes());
    placing.place(*storage);
    copied += storage->nbytes();
    if (copied < kDropEvery) continue;
    memory->drop();
    copied = 0;
  }
  memory->drop();
}

Storages moments_of(optim::AdamW& optimizer) {
  Storages out;
  std::unordered_set<c10::StorageImpl*> seen;
  for (const at::Tensor& moment : optimizer.held_moments()) {
    c10::StorageImpl* storage = moment.storage().unsafeGetStorageImpl();
    if (seen.insert(storage).second) out.push_back(storage);
  }
  return out;
}

// Lets a step pass through the file instead of gathering it in memory.
std::function<void(const Param&)> drop_at_times(std::shared_ptr<SpareMemory> memory) {
  return [memory = std::move(memory), touched = size_t{0}](const Param& param) mutable {
    touched += 3 * param.master.nbytes();
    if (touched < kDropEvery) return;
    memory->drop();
    touched = 0;
  };
}

// Gradients start an update as zeros, so nothing is copied.
std::shared_ptr<SpareMemory> lend_gradients(ParamTable& params) {
  params.ensure_grads();
  const Storages storages = params.grad_storages();
  const auto memory = SpareMemory::anonymous(total_bytes(storages));
  Placing placing(memory);
  for (c10::StorageImpl* storage : storages) placing.place(*storage);
  return memory;
}

}  // namespace

OffloadOptions offload_of(const FsdpConfig& fsdp,
                          const MegatronConfig& megatron,
                          const std::optional<std::string>& folder) {
  const bool all = fsdp.offload_policy;
  return {.folder = folder.value_or(""),
          .masters = all || fsdp.param_offload || megatron.param_offload,
          .gradients = all || fsdp.grad_offload || megatron.grad_offload,
          .moments = all || fsdp.optimizer_offload || megatron.optimizer_offload};
}

OffloadOptions actor_offload(const Config& config) {
  return offload_of(config.actor.fsdp, config.actor.megatron, config.offload_dir);
}

OffloadOptions critic_offload(const Config& config) {
  return offload_of(config.critic.fsdp, config.critic.megatron, config.offload_dir);
}

OffloadOptions reference_offload(const Config& config) {
  const bool all = config.ref_fsdp_param_offload || config.ref_megatron_param_offload;
  return {.folder = config.offload_dir.value_or(""), .masters = all, .forms = all};
}

bool wants_folder(const OffloadOptions& options) {
  return options.folder.empty() && (options.masters || options.moments);
}

void offload(const OffloadOptions& options, models::CausalLM& model, optim::AdamW* optimizer) {
  if (!model.options().device.is_cpu()) return;
  ParamTable& params = model.params().owned();
  std::vector<std::shared_ptr<SpareMemory>> spare;
  if (options.gradients) spare.push_back(lend_gradients(params));
  if (!options.folder.empty()) {
    Storages storages;
    const auto add = [&](const Storages& more) {
      storages.insert(storages.end(), more.begin(), more.end());
    };
    if (options.masters) add(params.master_storages());
    if (options.forms) add(params.form_storages());
    if (options.moments && optimizer != nullptr) add(moments_of(*optimizer));
    if (!storages.empty()) {
      spare.push_back(SpareMemory::in_file(options.folder, total_bytes(storages)));
      move_into(spare.back(), storages);
      if (optimizer != nullptr) optimizer->on_stepped(drop_at_times(spare.back()));
    }
  }
  if (spare.empty()) return;
  release_freed_memory();
  params.on_rest([spare] {
    for (const auto& memory : spare) memory->drop();
  });
}

}  // namespace banyan::train
