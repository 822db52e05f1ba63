#include "banyan/algo/user_function.h"

#include <map>
#include <mutex>

namespace banyan::algo {
namespace {

// Functions by name behind a lock.
template <typename Function>
class Table {
 public:
  void set(const std::string& name, Function function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    functions_[name] = std::move(function);
  }
  Function get(const char* key, const std::string& name) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = functions_.find(name);
    BANYAN_CHECK(
        found != functions_.end(), "[", key, "] '", name, "': wanted a loaded function, got none");
    return found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Function> functions_;
};

Table<PolicyLoss>& losses() {
  static Table<PolicyLoss> table;
  return table;
}

Table<AdvantageFunction>& estimators() {
  static Table<AdvantageFunction> table;
  return table;
}

}  // namespace

bool is_user_function(const std::string& name) { return name.find(':') != std::string::npos; }

void set_user_loss(const std::string& name, PolicyLossFunction function, bool applies_weight) {
  PolicyLoss entry;
  entry.function = std::move(function);
  entry.scope = PolicyScope::kMiniBatch;
  entry.applies_weight = applies_weight;
  entry.is_user = true;
  losses().set(name, std::move(entry));
}

void set_user_advantage(const std::string& name, AdvantageFunction function) {
  estimators().set(name, std::move(function));
}

PolicyLoss user_loss(const std::string& name) {
  return losses().get("actor.policy_loss.loss_mode", name);
}

AdvantageFunction user_advantage(const std::string& name) {
  return estimators().get("algorithm.adv_estimator", name);
}

}  // namespace banyan::algo
