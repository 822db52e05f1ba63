// One row of logits and the tokens drawn from it (rollout specification 3.2):
//   1. raw log-softmax of z, before anything else
//   2. z': grammar, allowed ids, bad words, min_tokens, logit_bias, repetition, frequency,
//      presence; greedy takes the largest here
//   3. softmax(z' / T), cut by min_p, top_k, top_p (truncation.h), and one draw from what is left
//   4. processed log-probability, kept mass, likely tokens with their ranks
// Steps 3 and 4 without a cut have the bits of the folded head (kernels/cpu/head_draw.h). Not for
// two threads at once.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "banyan/kernels/cpu/head_draw.h"
#include "banyan/rollout/event.h"
#include "banyan/rollout/sampling/response_state.h"
#include "banyan/rollout/sampling/truncation.h"

namespace banyan::rollout {

enum class DrawStatus : uint8_t {
  kDrawn,
  kNotFinite,    // NaN or infinity among the logits: the weights may have diverged
  kNothingLeft,  // grammar, allowed ids, bad words and min_tokens together bar every token
};

struct Drawn {
  DrawStatus status = DrawStatus::kDrawn;
  // log_softmax(z' / T)[token], T = 1 when greedy: the bits of scoring (ops/edge_logprob.h) where
  // nothing changes the logits. record.processed = this - record.log_kept_mass.
  float logprob = 0.0f;
  TokenRecord record;  // its vectors are kept and refilled: swap rather than move them out
};

class RowSampler {
 public:
  explicit RowSampler(int32_t vocab);

  // z [vocab] fp32, borrowed until the next load; draw() changes it and puts it back.
  void load(float* z);
  // Draws with the uniform number u in [0, 1). record.raw is 0 unless with_raw, or where it comes
  // for nothing.
  void draw(const ResponseState& response, float u, bool with_raw, Drawn& out);
  // log_softmax(z) of `token`, of the num_top likeliest and of `ids`. False if z is not finite.
  bool score(int32_t token,
             int32_t num_top,
             const std::vector<int32_t>& ids,
             std::vector<TokenLogprob>& out);

 private:
  // A law with what draws from it.
  struct Tempered {
    bool known = false;
    float inverse_t = 1.0f;
    kernels::RowLaw law;
    std::vector<kernels::TileMass> masses;
    // fp32 log-softmax of a logit.
    double log_softmax(float logit) const { return logit * inverse_t - law.log_sum; }
  };

  const Tempered& raw();
  const Tempered& tempered(const float* z, bool edited, float inverse_t);
  float* edit(const ResponseState& response);
  void mask(const ResponseState& response);
  void bar_tokens(const ResponseState& response);
  void penalise(const ResponseState& response);
  void change(int32_t id, float logit);
  void restore();
  int32_t draw_token(const float* z, const SamplingPlan& plan, const Tempered& law, float u);
  void list_top(const float* z,
                const Tempered& law,
                bool truncated,
                int32_t token,
                int32_t num_top,
                const std::vector<int32_t>& ids,
                std::vector<TokenLogprob>& out);
  void list_survivors(const float* z, bool truncated, std::vector<int32_t>& out) const;

  int32_t vocab_;
  float* z_ = nullptr;
  Tempered raw_;
  Tempered scaled_;
  Truncation truncation_;
  const SamplingPlan* truncated_for_ = nullptr;  // its plan, while the row is not edited
  BlockMaxima maxima_;
  std::vector<Candidate> likely_;
  std::vector<float> masked_;  // [vocab] where a mask bars most ids; else the row itself is edited
  float* edited_ = nullptr;
  std::vector<std::pair<int32_t, float>> undo_;  // ids and their logits, in the order of changes
};

}  // namespace banyan::rollout
