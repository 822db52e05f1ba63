// What a model and its optimizer do not need all the time, moved out of memory between uses:
// masters and moments into unnamed files of banyan.offload_dir, gradients into memory that is given
// back after each update. Values and results do not change. On a CPU only.
//
// Who is done with masters and gradients says ParamTable::rest(): apply_gradients, whoever saved a
// checkpoint, a pass of the reference model. The next use brings the pages back.
#pragma once

#include <optional>
#include <string>

#include "banyan/core/config.h"
#include "banyan/models/causal_lm.h"
#include "banyan/optim/adamw.h"

namespace banyan::train {

struct OffloadOptions {
  std::string folder{};  // of the files; empty: masters, forms and moments stay
  bool masters = false;  // ..._offload: parameters
  bool forms = false;    // the compute forms too, of a model that is used now and then
  bool gradients = false;
  bool moments = false;
};

OffloadOptions offload_of(const FsdpConfig& fsdp,
                          const MegatronConfig& megatron,
                          const std::optional<std::string>& folder);
OffloadOptions actor_offload(const Config& config);
OffloadOptions critic_offload(const Config& config);
OffloadOptions reference_offload(const Config& config);

// True if some of `options` waits for a folder, and what a run then says.
bool wants_folder(const OffloadOptions& options);
inline constexpr const char* kWantsFolder =
    "param_offload, optimizer_offload: on a CPU all memory is host memory; set banyan.offload_dir "
    "to "
    "move weights and moments to a disk between uses";

// Moves the memory and registers what rest() does. Gradients are allocated. `optimizer` may be
// null. To be called once the weights and the optimizer's state have their first values. Throws
// FileError naming the folder.
// Where the parameters lie in parts over ranks, it is this rank's part that moves.
void offload(const OffloadOptions& options, models::CausalLM& model, optim::AdamW* optimizer);

}  // namespace banyan::train
