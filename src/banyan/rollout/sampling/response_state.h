// What sampling keeps of one response: how often each token stands in it (penalties), the state of
// its grammar, how far each stop string has matched. A response's state is a function of its tokens
// alone, so it survives preemption untouched. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/rollout/sampling/sampling_plan.h"

namespace banyan::rollout {

// Why a response ends with the token just appended.
struct Ending {
  enum class Kind : uint8_t { kNone, kEos, kStopToken, kLength, kRepetition, kStopString };
  Kind kind = Kind::kNone;
  int32_t stop_token = -1;   // kStopToken: its id
  int32_t stop_string = -1;  // kStopString: index into SamplingParams::stop

  explicit operator bool() const { return kind != Kind::kNone; }
  FinishReason reason() const;  // of an ending
};

class ResponseState {
 public:
  struct TokenCount {
    int32_t token = 0;
    int32_t count = 0;
    bool in_prompt = false;
  };

  // Borrows the plan.
  explicit ResponseState(const SamplingPlan& plan);

  // Takes a drawn token and says whether it ends the response, in the order of the rollout
  // specification 3.3: EOS, stop ids, length; not below min_tokens: repetition, stop strings.
  // O(bytes of the token x stop strings + longest pattern); no allocation once the vectors have
  // grown.
  Ending append(int32_t token);

  const SamplingPlan& plan() const { return *plan_; }
  int32_t num_tokens() const { return num_tokens_; }
  bool below_min_tokens() const { return num_tokens_ < plan_->params.min_tokens; }
  // The logits are changed before the next token is drawn.
  bool edits() const { return plan_->edits || (below_min_tokens() && !plan_->end_ids.empty()); }
  // Only temperature or argmax: the folded head may draw the next token.
  bool plain() const { return !plan_->truncates && !plan_->collects && !edits(); }
  int32_t grammar_state() const { return grammar_state_; }
  // EOS may follow, and ends the response whatever ignore_eos says.
  bool grammar_may_end() const;
  // Distinct tokens of the response in the order of their first appearance; empty unless penalised.
  const std::vector<TokenCount>& counts() const { return counts_; }
  // All tokens of the response; empty unless bad words or repetition detection need them.
  const std::vector<int32_t>& history() const { return history_; }

 private:
  void remember(int32_t token);
  void count(int32_t token);
  void grow_index();
  bool repeats();
  Ending match_stops(int32_t token);

  const SamplingPlan* plan_;
  int32_t num_tokens_ = 0;
  int32_t grammar_state_ = 0;
  std::vector<TokenCount> counts_;
  std::vector<int32_t> index_;  // open addressing, power of two: position in counts_ or -1
  std::vector<int32_t> history_;
  std::vector<int32_t> run_;  // per period: tokens at the end that equal the one a period before
  std::vector<int32_t> matched_;  // per stop string: bytes matched so far
};

}  // namespace banyan::rollout
