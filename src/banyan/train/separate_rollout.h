// Rollout on ranks that only generate. The first rank that trains and these are one group, over
// which three things travel, once the latter said which parameters they want as masters:
//   order     from the first: what to do next, for which step, and whether new weights follow
//   weights   from the first (train/weight_push.h)
//   delivery  from the first that generates: samples with their scores, and where the data stands
// The ranks that generate draw the prompts, generate and score, with all rules of
// train/sampling_stage.h among themselves; the ranks that train are told the batch as it is.
//
// Which weights draw which batch follows from the step alone, never from who is faster:
//   batches_ahead 0   weights k-1, order k -> batch k -> update k
//   batches_ahead 1   batch k -> weights k-1, order k+1 -> update k, while k+1 is generated
// so a batch is at most one step old, batches 1 and 2 both come from the first weights, and two
// runs have the same bits. A checkpoint holds the batch that is on its way (Sampler::ahead). A
// validation waits for that batch, and answers with the weights of now.
#pragma once

#include <memory>

#include "banyan/parallel/groups.h"
#include "banyan/train/sampler.h"
#include "banyan/train/sharded_model.h"

namespace banyan::train {

// The side of the ranks that train. All are borrowed; `fsdp` is the actor's, or null. Nothing
// behind step `num_steps` is asked for.
std::unique_ptr<Sampler> separate_sampler(const Config& config,
                                          Host& host,
                                          parallel::Groups& groups,
                                          models::CausalLM& actor,
                                          parallel::Fsdp* fsdp,
                                          int64_t num_steps);

// What a rank does that only generates, until the others end the run. Throws as train() does.
void generate_for_others(const Config& config,
                         Host& host,
                         const GeneratorFactory& factory,
                         parallel::Groups& groups);

}  // namespace banyan::train
