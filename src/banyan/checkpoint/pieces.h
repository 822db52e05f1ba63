// The state of a model whose weights lie in parts on several ranks (parallel/fsdp.h): each writes
// its part, nobody gathers.
#pragma once

#include <string>

#include "banyan/checkpoint/manifest.h"
#include "banyan/optim/adamw.h"
#include "banyan/parallel/fsdp.h"

namespace banyan::checkpoint {

// The keeper of a model's parameters, if they are in parts; null: they are whole.
parallel::Fsdp* parts_of(const ParamTable& params);

// "state/rank_0_of_2.safetensors"
std::string piece_file(int64_t rank, int64_t num_ranks);

// Writes this rank's file below `path`, whose state/ is there. Of ranks with equal parts only the
// first replica writes; nothing for the others. Throws FileError.
void write_pieces(const std::string& path, parallel::Fsdp& fsdp, optim::AdamW& optimizer);

// Where the tensors of all ranks lie.
void add_places(const parallel::Fsdp& fsdp, Manifest& manifest);

}  // namespace banyan::checkpoint
