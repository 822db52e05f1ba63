// Losses and advantages written by the user as Python functions: a configuration names them as
// "file.py:function", python/banyan/algo_functions.py loads the file, the binding wraps the
// callable and puts it here under that name. This is the one mutable global of the folder: it
// stands beside the built-in registries, which are looked up by name as well, so that no caller of
// a loss has to carry it. Thread-safe.
#pragma once

#include <string>

#include "banyan/algo/advantage.h"
#include "banyan/algo/loss.h"

namespace banyan::algo {

// True for a name of the form "file.py:function".
bool is_user_function(const std::string& name);

// What a function returns is checked: shapes, finite numbers, a loss that depends on log_prob; an
// error names the function. An estimator sees only the rows that take part, numbered from 0; the
// others get 0.
//
// Puts a function under its name; a second call replaces it. A loss that `applies_weight`
// multiplies the rollout-correction weights itself; otherwise actor_loss does.
void set_user_loss(const std::string& name, PolicyLossFunction function, bool applies_weight);
void set_user_advantage(const std::string& name, AdvantageFunction function);

// Throws [actor.policy_loss.loss_mode] / [algorithm.adv_estimator] if nothing was loaded under it.
PolicyLoss user_loss(const std::string& name);
AdvantageFunction user_advantage(const std::string& name);

}  // namespace banyan::algo
