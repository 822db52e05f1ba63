// Gradients by hand: d(-log s(z))/dz = -s(-z); h is linear in every token log-probability with
// weight +1 (chosen) or -1 (rejected).
#include "banyan/algo/preference.h"

#include <ATen/ops/zeros.h>

#include <cmath>

#include "banyan/core/error.h"

namespace banyan::algo {
namespace {

// log(1 / (1 + exp(-z))) without overflow.
double log_sigmoid(double z) {
  return z >= 0.0 ? -std::log1p(std::exp(-z)) : z - std::log1p(std::exp(z));
}
double sigmoid(double z) { return std::exp(log_sigmoid(z)); }

struct Term {
  double loss = 0.0;
  double grad = 0.0;  // d loss / d h
};

Term pair_term(double h, const PreferenceOptions& options) {
  const double beta = options.beta;
  if (options.loss_type == "ipo") {
    const double gap = h - 1.0 / (2.0 * beta);
    return {gap * gap, 2.0 * gap};
  }
  const double e = options.label_smoothing;
  const double z = beta * h;
  return {-(1.0 - e) * log_sigmoid(z) - e * log_sigmoid(-z),
          beta * (-(1.0 - e) * sigmoid(-z) + e * sigmoid(z))};
}

// One sample: its log-probability under policy and reference, and where its gradient goes.
struct SampleView {
  int64_t begin = 0, end = 0;
  double policy = 0.0, reference = 0.0;
};

class Pairs {
 public:
  Pairs(const PreferenceTokens& tokens, const PreferenceOptions& options)
      : tokens_(tokens), options_(options) {
    log_prob_ = tokens.log_prob.detach().to(at::kCPU, at::kDouble).contiguous();
    if (!options.reference_free) {
      reference_ = tokens.ref_log_prob.detach().to(at::kCPU, at::kDouble).contiguous();
    }
    grad_ = at::zeros({log_prob_.numel()}, at::kDouble);
  }

  SampleView view(int64_t sample) const {
    SampleView out;
    out.begin = tokens_.offsets[sample];
    out.end = tokens_.offsets[sample + 1];
    out.policy = sum(log_prob_, out);
    if (reference_.defined()) out.reference = sum(reference_, out);
    return out;
  }

  void add_grad(const SampleView& sample, double grad) {
    double* g = grad_.mutable_data_ptr<double>();
    for (int64_t u = sample.begin; u < sample.end; ++u) g[u] += grad;
  }
  const at::Tensor& grad() const { return grad_; }

 private:
  static double sum(const at::Tensor& values, const SampleView& sample) {
    const double* x = values.const_data_ptr<double>();
    double out = 0.0;
    for (int64_t u = sample.begin; u < sample.end; ++u) out += x[u];
    return out;
  }

  const PreferenceTokens& tokens_;
  const PreferenceOptions& options_;
  at::Tensor log_prob_, reference_, grad_;
};

void check_sizes(const PreferenceTokens& tokens, const PreferenceOptions& options) {
  BANYAN_ASSERT(!tokens.offsets.empty() && tokens.offsets.back() == tokens.log_prob.numel() &&
                    tokens.chosen.size() == tokens.rejected.size(),
                "preference_loss: vectors of other lengths");
  BANYAN_ASSERT(options.reference_free || (tokens.ref_log_prob.defined() &&
                                           tokens.ref_log_prob.numel() == tokens.log_prob.numel()),
                "preference_loss: no reference");
}

}  // namespace

PreferenceResult preference_loss(const PreferenceTokens& tokens,
                                 double num_pairs,
                                 const PreferenceOptions& options) {
  check_sizes(tokens, options);
  Pairs pairs(tokens, options);
  PreferenceResult result;
  double chosen_reward = 0, rejected_reward = 0, right = 0, chosen_logp = 0, rejected_logp = 0;
  for (size_t p = 0; p < tokens.chosen.size(); ++p) {
    const SampleView chosen = pairs.view(tokens.chosen[p]);
    const SampleView rejected = pairs.view(tokens.rejected[p]);
    const double reward_chosen = options.beta * (chosen.policy - chosen.reference);
    const double reward_rejected = options.beta * (rejected.policy - rejected.reference);
    const double h = (chosen.policy - chosen.reference) - (rejected.policy - rejected.reference);
    const Term term = pair_term(h, options);
    result.loss += term.loss / num_pairs;
    const double grad = term.grad / num_pairs;
    pairs.add_grad(chosen, grad);
    pairs.add_grad(rejected, -grad);
    const auto n = static_cast<double>(chosen.end - chosen.begin);
    if (options.sft_coef != 0.0 && n > 0.0) {
      result.loss -= options.sft_coef * chosen.policy / (n * num_pairs);
      pairs.add_grad(chosen, -options.sft_coef / (n * num_pairs));
    }
    chosen_reward += reward_chosen;
    rejected_reward += reward_rejected;
    right += h > 0.0 ? 1.0 : 0.0;
    chosen_logp += chosen.policy;
    rejected_logp += rejected.policy;
  }
  const auto count = static_cast<double>(tokens.chosen.size());
  result.metrics["rewards/chosen"] = mean_of(chosen_reward, count);
  result.metrics["rewards/rejected"] = mean_of(rejected_reward, count);
  result.metrics["rewards/margins"] = mean_of(chosen_reward - rejected_reward, count);
  result.metrics["rewards/accuracies"] = mean_of(right, count);
  result.metrics["logps/chosen"] = mean_of(chosen_logp, count);
  result.metrics["logps/rejected"] = mean_of(rejected_logp, count);
  result.grad = pairs.grad().to(tokens.log_prob.options());
  return result;
}

void check_preference_options(const PreferenceOptions& options) {
  BANYAN_CHECK(options.loss_type == "sigmoid" || options.loss_type == "ipo",
               "[preference.objective] wanted sigmoid or ipo, got '",
               options.loss_type,
               "'");
  BANYAN_CHECK(std::isfinite(options.beta) && options.beta > 0.0,
               "[preference.beta] wanted a finite number > 0, got ",
               options.beta);
  BANYAN_CHECK(options.label_smoothing >= 0.0 && options.label_smoothing < 0.5,
               "[preference.label_smoothing] wanted a number in [0, 0.5), got ",
               options.label_smoothing);
  BANYAN_CHECK(options.label_smoothing == 0.0 || options.loss_type == "sigmoid",
               "[preference.label_smoothing] wanted 0 with preference.objective=ipo, got ",
               options.label_smoothing);
  BANYAN_CHECK(std::isfinite(options.sft_coef) && options.sft_coef >= 0.0,
               "[preference.rpo_alpha] wanted a finite number >= 0, got ",
               options.sft_coef);
}

RewardModelResult reward_model_loss(const at::Tensor& chosen,
                                    const at::Tensor& rejected,
                                    const at::Tensor& margin,
                                    double num_pairs,
                                    const RewardModelOptions& options) {
  const int64_t size = chosen.numel();
  BANYAN_ASSERT(rejected.numel() == size && (!margin.defined() || margin.numel() == size),
                "reward_model_loss: vectors of other lengths");
  const at::Tensor good = chosen.detach().to(at::kCPU, at::kDouble).contiguous();
  const at::Tensor bad = rejected.detach().to(at::kCPU, at::kDouble).contiguous();
  const at::Tensor wanted = margin.defined()
                                ? margin.detach().to(at::kCPU, at::kDouble).contiguous()
                                : at::zeros({size}, at::kDouble);
  at::Tensor grad_good = at::zeros({size}, at::kDouble), grad_bad = at::zeros({size}, at::kDouble);
  RewardModelResult result;
  double right = 0, gap = 0, sum_good = 0, sum_bad = 0;
  for (int64_t p = 0; p < size; ++p) {
    const double c = good.const_data_ptr<double>()[p], r = bad.const_data_ptr<double>()[p];
    const double z = c - r - wanted.const_data_ptr<double>()[p];
    const double centre = options.center_rewards_coefficient * (c + r);
    result.loss += (-log_sigmoid(z) + centre * (c + r)) / num_pairs;
    grad_good.mutable_data_ptr<double>()[p] = (-sigmoid(-z) + 2.0 * centre) / num_pairs;
    grad_bad.mutable_data_ptr<double>()[p] = (sigmoid(-z) + 2.0 * centre) / num_pairs;
    right += c > r ? 1.0 : 0.0;
    gap += c - r;
    sum_good += c;
    sum_bad += r;
  }
  const auto count = static_cast<double>(size);
  result.metrics["rewards/accuracies"] = mean_of(right, count);
  result.metrics["rewards/margins"] = mean_of(gap, count);
  result.metrics["rewards/chosen"] = mean_of(sum_good, count);
  result.metrics["rewards/rejected"] = mean_of(sum_bad, count);
  result.grad_chosen = grad_good.to(chosen.options());
  result.grad_rejected = grad_bad.to(rejected.options());
  return result;
}

}  // namespace banyan::algo
