// Reads algorithm.rollout_correction.{rollout_is, rollout_is_threshold, rollout_rs,
// rollout_rs_threshold}: numbers, pairs "lo_hi" and comma lists.
#include <array>
#include <cmath>
#include <cstdlib>

#include "banyan/algo/detail/correction_rules.h"

namespace banyan::algo {
namespace detail {
namespace {

constexpr const char* kKey = "[algorithm.rollout_correction.";

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

// A finite positive number, the whole text.
double positive(const char* key, const std::string& text, const std::string& whole) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool is_number = !text.empty() && end == text.c_str() + text.size();
  BANYAN_CHECK(is_number && std::isfinite(value) && value > 0.0,
               kKey,
               key,
               "] wanted a positive number or two joined as lo_hi, got '",
               whole,
               "'");
  return value;
}

struct Bounds {
  double low = 0.0, high = 0.0;
  bool is_pair = false;
};

Bounds bounds(const char* key, const std::string& text) {
  const std::vector<std::string> parts = split(text, '_');
  BANYAN_CHECK(parts.size() <= 2, kKey, key, "] wanted a number or lo_hi, got '", text, "'");
  Bounds out;
  out.is_pair = parts.size() == 2;
  if (out.is_pair) out.low = positive(key, parts[0], text);
  out.high = positive(key, parts.back(), text);
  BANYAN_CHECK(!out.is_pair || out.low < out.high, kKey, key, "] wanted lo < hi, got '", text, "'");
  return out;
}

RsRule named_rule(const std::string& name) {
  static constexpr std::array<const char*, 4> kScopes = {
      "token_k", "seq_sum_k", "seq_mean_k", "seq_max_k"};
  for (size_t scope = 0; scope < kScopes.size(); ++scope) {
    const std::string stem = kScopes[scope];
    if (name.size() != stem.size() + 1 || name.compare(0, stem.size(), stem) != 0) continue;
    const int k = name.back() - '0';
    const int least = stem == "seq_max_k" ? 2 : 1;
    if (k < least || k > 3) continue;
    RsRule rule;
    rule.name = name;
    rule.scope = static_cast<RsScope>(scope);
    rule.k = k;
    return rule;
  }
  BANYAN_CHECK(false,
               kKey,
               "rollout_rs] wanted token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2 or "
               "seq_max_k3, got '",
               name,
               "'");
  return {};
}

}  // namespace

IsRule is_rule(const CorrectionOptions& options) {
  IsRule rule;
  if (options.rollout_is.empty()) return rule;
  BANYAN_CHECK(options.rollout_is == "token" || options.rollout_is == "sequence",
               kKey,
               "rollout_is] wanted token, sequence or null, got '",
               options.rollout_is,
               "'");
  BANYAN_CHECK(!trimmed(options.rollout_is_threshold).empty(),
               kKey,
               "rollout_is_threshold] wanted a number or lo_hi with rollout_is=",
               options.rollout_is,
               ", got null: without a bound there would be no weights");
  rule.level = options.rollout_is == "token" ? IsLevel::kToken : IsLevel::kSequence;
  const Bounds bound = bounds("rollout_is_threshold", trimmed(options.rollout_is_threshold));
  rule.zero_outside = bound.is_pair;
  rule.high = bound.high;
  rule.low = bound.is_pair ? bound.low : 1.0 / bound.high;
  return rule;
}

std::vector<RsRule> rs_rules(const CorrectionOptions& options) {
  std::vector<RsRule> rules;
  if (trimmed(options.rollout_rs).empty()) return rules;
  for (const std::string& name : split(options.rollout_rs, ',')) rules.push_back(named_rule(name));
  BANYAN_CHECK(!trimmed(options.rollout_rs_threshold).empty(),
               kKey,
               "rollout_rs_threshold] wanted a threshold with rollout_rs=",
               options.rollout_rs,
               ", got null");
  const std::vector<std::string> texts = split(options.rollout_rs_threshold, ',');
  BANYAN_CHECK(texts.size() == 1 || texts.size() == rules.size(),
               kKey,
               "rollout_rs_threshold] wanted one threshold, or one per rule (",
               rules.size(),
               "), got ",
               texts.size());
  for (size_t i = 0; i < rules.size(); ++i) {
    const std::string& text = texts.size() == 1 ? texts[0] : texts[i];
    const Bounds bound = bounds("rollout_rs_threshold", text);
    RsRule& rule = rules[i];
    if (rule.k == 1) {
      rule.low = std::log(bound.is_pair ? bound.low : 1.0 / bound.high);
      rule.high = std::log(bound.high);
      BANYAN_CHECK(rule.low < rule.high,
                   kKey,
                   "rollout_rs_threshold] wanted a number > 1 or lo_hi for ",
                   rule.name,
                   ", got '",
                   text,
                   "'");
      continue;
    }
    BANYAN_CHECK(!bound.is_pair,
                 kKey,
                 "rollout_rs_threshold] wanted one upper bound for ",
                 rule.name,
                 ", got '",
                 text,
                 "'");
    rule.low = -HUGE_VAL;  // k2 and k3 are bounded from above only
    rule.high = bound.high;
  }
  return rules;
}

}  // namespace detail

void check_correction_options(const CorrectionOptions& options) {
  detail::is_rule(options);
  detail::rs_rules(options);
}

}  // namespace banyan::algo
