#include "banyan/algo/user_function.h"

#include <cmath>
#include <map>
#include <mutex>

namespace banyan::algo {
namespace {

constexpr const char* kLossKey = "actor.policy_loss.loss_mode";
constexpr const char* kAdvantageKey = "algorithm.adv_estimator";

// Entries by name behind a lock.
template <typename Entry>
class Table {
 public:
  void set(const std::string& name, Entry entry) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_[name] = std::move(entry);
  }
  Entry get(const char* key, const std::string& name) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(name);
    BANYAN_CHECK(
        found != entries_.end(), "[", key, "] wanted a loaded function '", name, "', got none");
    return found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

Table<PolicyLoss>& losses() {
  static Table<PolicyLoss> table;
  return table;
}

Table<AdvantageFunction>& estimators() {
  static Table<AdvantageFunction> table;
  return table;
}

std::string shape_text(const at::Tensor& tensor) {
  return tensor.defined() ? detail::concat(tensor.sizes()) : std::string("none");
}

// What the user's loss returned: a loss per token that autograd can follow back to log_prob.
void check_loss(const std::string& name, const at::Tensor& loss, const LossTokens& tokens) {
  const int64_t size = tokens.log_prob.numel();
  BANYAN_CHECK(loss.defined() && loss.dim() == 1 && loss.numel() == size,
               "[",
               kLossKey,
               "] ",
               name,
               ": wanted one loss per token, a tensor of shape [",
               size,
               "], got ",
               shape_text(loss));
  BANYAN_CHECK(loss.device().is_cpu() && at::isFloatingType(loss.scalar_type()),
               "[",
               kLossKey,
               "] ",
               name,
               ": wanted a floating-point tensor on the CPU, got ",
               loss.toString(),
               " on ",
               loss.device().str());
  BANYAN_CHECK(size == 0 || loss.requires_grad(),
               "[",
               kLossKey,
               "] ",
               name,
               ": wanted a loss that depends on log_prob, got a constant (was it detached?)");
  const at::Tensor values = loss.detach().to(at::kDouble).contiguous();
  const at::Tensor mask = tokens.mask.contiguous();
  for (int64_t u = 0; u < size; ++u) {
    const double value = values.const_data_ptr<double>()[u];
    BANYAN_CHECK(mask.const_data_ptr<double>()[u] == 0.0 || std::isfinite(value),
                 "[",
                 kLossKey,
                 "] ",
                 name,
                 ": wanted finite numbers, got ",
                 value,
                 " at token ",
                 u);
  }
}

// Rows that take part, in order: all that the user's estimator sees.
AdvantageInput rows_of(const AdvantageInput& input, const std::vector<size_t>& rows) {
  AdvantageInput out;
  const auto take = [&](const auto& from, auto& to) {
    if (from.empty()) return;
    for (const size_t row : rows) to.push_back(from[row]);
  };
  take(input.group, out.group);
  take(input.valid, out.valid);
  take(input.score, out.score);
  take(input.token_reward, out.token_reward);
  take(input.trajectory, out.trajectory);
  take(input.value, out.value);
  take(input.old_log_prob, out.old_log_prob);
  take(input.sum_squares, out.sum_squares);
  take(input.weight, out.weight);
  take(input.position, out.position);
  take(input.greedy_score, out.greedy_score);
  for (const auto& [name, values] : input.components) take(values, out.components[name]);
  return out;
}

void check_rows(const std::string& name,
                const char* what,
                const PerToken& got,
                const PerToken& wanted) {
  BANYAN_CHECK(got.size() == wanted.size(),
               "[",
               kAdvantageKey,
               "] ",
               name,
               ": wanted ",
               what,
               " of ",
               wanted.size(),
               " responses, got ",
               got.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    BANYAN_CHECK(got[i].size() == wanted[i].size(),
                 "[",
                 kAdvantageKey,
                 "] ",
                 name,
                 ": wanted ",
                 wanted[i].size(),
                 " ",
                 what,
                 " for response ",
                 i,
                 ", got ",
                 got[i].size());
    for (const double value : got[i]) {
      BANYAN_CHECK(std::isfinite(value),
                   "[",
                   kAdvantageKey,
                   "] ",
                   name,
                   ": wanted finite ",
                   what,
                   ", got ",
                   value,
                   " for response ",
                   i);
    }
  }
}

AdvantageResult call_estimator(const std::string& name,
                               const AdvantageFunction& function,
                               const AdvantageInput& input,
                               const AdvantageOptions& options) {
  std::vector<size_t> rows;
  for (size_t row = 0; row < input.token_reward.size(); ++row) {
    if (input.valid[row] && !input.token_reward[row].empty()) rows.push_back(row);
  }
  const AdvantageInput seen = rows_of(input, rows);
  AdvantageResult part;
  if (!rows.empty()) part = function(seen, options);
  check_rows(name, "advantages", part.advantage, seen.token_reward);
  check_rows(name, "returns", part.returns, seen.token_reward);
  AdvantageResult result;
  for (const auto& row : input.token_reward) result.advantage.emplace_back(row.size(), 0.0);
  result.returns = result.advantage;
  for (size_t k = 0; k < rows.size(); ++k) {
    result.advantage[rows[k]] = std::move(part.advantage[k]);
    result.returns[rows[k]] = std::move(part.returns[k]);
  }
  return result;
}

}  // namespace

bool is_user_function(const std::string& name) { return name.find(':') != std::string::npos; }

void set_user_loss(const std::string& name, PolicyLossFunction function, bool applies_weight) {
  PolicyLoss entry;
  entry.function = [name, function = std::move(function)](const LossTokens& tokens,
                                                          const at::Tensor& log_prob,
                                                          const LossOptions& options) {
    PolicyLossResult result = function(tokens, log_prob, options);
    check_loss(name, result.loss, tokens);
    result.loss = result.loss.to(at::kDouble);
    return result;
  };
  entry.scope = PolicyScope::kMiniBatch;
  entry.applies_weight = applies_weight;
  entry.is_user = true;
  losses().set(name, std::move(entry));
}

void set_user_advantage(const std::string& name, AdvantageFunction function) {
  estimators().set(name,
                   [name, function = std::move(function)](const AdvantageInput& input,
                                                          const AdvantageOptions& options) {
                     return call_estimator(name, function, input, options);
                   });
}

PolicyLoss user_loss(const std::string& name) { return losses().get(kLossKey, name); }

AdvantageFunction user_advantage(const std::string& name) {
  return estimators().get(kAdvantageKey, name);
}

}  // namespace banyan::algo
