// Watches passes over plans and says what sharing really did, in prefix-0501's log lines
// (train/sharing_log.h). A *pass* is one plan carried out: the update of a mini-batch, or the
// scoring of a batch; it takes the part of prefix-0501's micro-batch. What is expected comes from
// the plan; every token count, layer, reuse and restore in the audit lines is counted while
// attention and head run.
//
//   prepare(pass, samples, plan)      the [PS][prepare] lines
//   watch(block, recompute, context)  around the attention of each block: counts its calls
//   outputs(samples, offsets)         log-probabilities of these samples have come out
//   finish()                          the [PS][audit] lines
//
// A row *provides* a token if it is the first in batch order whose path holds it; keys are never
// copied, so a row "reuses" what it reads in place. Used by one thread at a time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "banyan/core/attention_context.h"
#include "banyan/core/config.h"
#include "banyan/train/pass_observer.h"
#include "banyan/train/sharing_log.h"
#include "banyan/trie/plan.h"

namespace banyan::train {

struct ObservedPass {
  std::string name;                     // "update_actor", "ref_log_prob", ...
  std::vector<std::string> batch_keys;  // what the pass is given per token
  bool share = true;                    // what was decided for this pass
  bool native = true;                   // kernels: native, or plain LibTorch operators
};

class SharingObserver final : public PassObserver {
 public:
  using Say = std::function<void(const std::string&)>;

  // Throws [sharing] for another detector, [config] for another level.
  SharingObserver(const SharingConfig& config, const RankInfo& rank, Say say);
  ~SharingObserver() override;

  bool is_on() const { return level_ != ObserveLevel::kOff; }

  void prepare(const ObservedPass& pass,
               const std::vector<Sample>& samples,
               const trie::Plan& plan);
  // `inner` itself where the pass is not observed; otherwise it must not outlive the observer.
  std::unique_ptr<AttentionContext> watch(int32_t block,
                                          bool recompute,
                                          std::unique_ptr<AttentionContext> inner) override;
  // `offsets` [samples + 1]: scored tokens of each sample whose log-probability was delivered.
  void outputs(const std::vector<int32_t>& samples, const std::vector<int64_t>& offsets) override;
  void finish();

 private:
  struct Pass;  // one pass between prepare and finish
  class Watch;  // an AttentionContext that counts

  void on_forward(int32_t block,
                  bool recompute,
                  int64_t layer,
                  const sharing_log::AttentionCall& call,
                  double seconds);
  void on_backward(int64_t layer, double seconds);
  bool shows(ObserveLevel level) const { return level_ >= level; }

  ObserveLevel level_;
  SharingConfig config_;
  std::unique_ptr<trie::Detector> older_rule_;  // null: the view of the plan itself
  RankInfo rank_;
  Say say_;
  int64_t num_passes_ = 0;
  std::map<std::string, int64_t> passes_by_name_;
  std::unique_ptr<Pass> pass_;
};

// Prepares a pass with the observer, if there is one that is on; returns what to hand to the walk.
// The caller ends with finish_pass.
PassObserver* prepare_pass(SharingObserver* observer,
                           const ObservedPass& pass,
                           const std::vector<Sample>& samples,
                           const trie::Plan& plan);
void finish_pass(SharingObserver* observer);

// Places of the batch's tokens in a plan: own tokens of its blocks, one block after the other.
struct PlanPlaces {
  std::vector<std::vector<int32_t>> paths;  // per sample, root first
  std::vector<int32_t> block;               // per place: the block that computes it
};
PlanPlaces places_of(const trie::Plan& plan, size_t num_samples);

}  // namespace banyan::train
