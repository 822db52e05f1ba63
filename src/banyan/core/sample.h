// The nouns of a batch. Torch-free: the trie and its planner work on these alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace banyan {

// What the trie merges: the tokens of one prompt + response, padding already stripped.
struct Sample {
  int64_t uid = 0;                 // unique in its batch; orders samples that pass through one node
  std::vector<int32_t> tokens;     // prompt, then response; at least one token
  std::vector<int32_t> positions;  // position ids, same length; empty means 0, 1, 2, ...
  std::vector<uint8_t> scored;     // same length: 1 = the log-probability of this token is wanted.
                                // scored[0] is ignored (a first token has no source); empty = all
};

enum class FinishReason : uint8_t { kStop, kLength, kAbort, kRepetition };

// Tokens [start, end) of a response were drawn from the weights of `epoch`.
struct WeightSpan {
  int64_t epoch = 0;    // +1 at each change of the weights
  std::string version;  // its label
  int32_t start = 0;
  int32_t end = 0;
};

// One response of the rollout with all that training needs of it. All vectors are of the response's
// length.
struct Trajectory {
  int64_t row =
      0;  // data row (position in the training batch); trajectories of one row form a group
  int32_t index = 0;  // 0..n-1 inside the group
  std::vector<int32_t> prompt;
  std::vector<int32_t> response;
  std::vector<uint8_t> response_mask;    // 1 = produced by the policy
  std::vector<float> rollout_log_probs;  // log_softmax(z / T)[token], before top-k / top-p
  std::vector<float> sampled_log_probs;  // after them: of the law that drew the token (T29); empty
                                         // where nothing was cut off
  std::optional<double> reward_model_score;  // of a reward model, before the host scores
  FinishReason finish = FinishReason::kStop;
  // Which weights drew which tokens, ascending; empty where that is not known. More than one span
  // for a response that went on after an update.
  std::vector<WeightSpan> weight_spans;
};

// The reward of one trajectory, as the host's scorer reports it.
struct Score {
  int64_t row = 0;
  int32_t index = 0;
  bool failed =
      false;  // the scorer crashed, hung or returned no finite number: leave the sample out
  std::string reason;  // why it failed
  double value = 0.0;
  std::vector<std::pair<std::string, double>> extra;  // other numeric entries ("acc", ...), logged
  std::vector<std::pair<std::string, std::string>> texts;  // and texts ("pred"), for the host
};

// Entry `name` of the scorer's mapping, or null.
inline const double* find_entry(const Score& score, const std::string& name) {
  for (const auto& [key, value] : score.extra) {
    if (key == name) return &value;
  }
  return nullptr;
}

}  // namespace banyan
