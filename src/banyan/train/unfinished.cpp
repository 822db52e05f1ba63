#include "banyan/train/unfinished.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/io/json.h"
#include "banyan/rollout/continuation.h"

namespace banyan::train {
namespace {

using io::Json;

template <typename T>
void append(const std::vector<T>& more, std::vector<T>& to) {
  to.insert(to.end(), more.begin(), more.end());
}

Json json_of(const Trajectory& trajectory) {
  Json spans = Json::array();
  for (const WeightSpan& span : trajectory.weight_spans) {
    spans.push_back({span.epoch, span.version, span.start, span.end});
  }
  Json out = {{"index", trajectory.index},
              {"response", trajectory.response},
              {"rollout_log_probs", trajectory.rollout_log_probs},
              {"sampled_log_probs", trajectory.sampled_log_probs},
              {"finish", static_cast<int>(trajectory.finish)},
              {"weight_spans", spans}};
  if (trajectory.reward_model_score) out["reward_model_score"] = *trajectory.reward_model_score;
  return out;
}

Trajectory trajectory_from(const Json& json, const PromptRow& row) {
  Trajectory out;
  out.row = row.row;
  out.prompt = row.tokens;
  out.index = json.at("index").get<int32_t>();
  json.at("response").get_to(out.response);
  out.response_mask.assign(out.response.size(), 1);
  json.at("rollout_log_probs").get_to(out.rollout_log_probs);
  json.at("sampled_log_probs").get_to(out.sampled_log_probs);
  out.finish = static_cast<FinishReason>(json.at("finish").get<int>());
  for (const Json& span : json.at("weight_spans")) {
    out.weight_spans.push_back({span.at(0).get<int64_t>(),
                                span.at(1).get<std::string>(),
                                span.at(2).get<int32_t>(),
                                span.at(3).get<int32_t>()});
  }
  if (json.contains("reward_model_score")) {
    out.reward_model_score = json.at("reward_model_score").get<double>();
  }
  return out;
}

}  // namespace

void add_prompts(const UnfinishedGroup& group, std::vector<rollout::Prompt>& prompts) {
  for (const Trajectory& cut : group.cut) {
    rollout::Prompt& prompt = prompts.emplace_back();
    prompt.row = group.row.row;
    prompt.tokens = group.row.tokens;
    append(cut.response, prompt.tokens);
    prompt.first_index = cut.index;
    prompt.original_prompt = static_cast<int32_t>(group.row.tokens.size());
  }
}

Trajectory joined(const Trajectory& cut, Trajectory more) {
  Trajectory out = cut;
  const auto used = static_cast<int32_t>(cut.response.size());
  append(more.response, out.response);
  append(more.response_mask, out.response_mask);
  append(more.rollout_log_probs, out.rollout_log_probs);
  append(more.sampled_log_probs, out.sampled_log_probs);
  // Where one part was drawn from a truncated law and the other has no tokens, nothing is missing.
  if (out.sampled_log_probs.size() != out.response.size()) out.sampled_log_probs.clear();
  rollout::append_spans(more.weight_spans, used, out.weight_spans);
  out.finish = more.finish;
  return out;
}

std::optional<WeightVersions> weight_versions(const Trajectory& trajectory) {
  std::optional<WeightVersions> versions;
  for (const WeightSpan& span : trajectory.weight_spans) {
    int64_t version = 0;
    const char* end = span.version.data() + span.version.size();
    const auto [at, error] = std::from_chars(span.version.data(), end, version);
    if (error != std::errc() || at != end) return std::nullopt;
    if (!versions) versions = {version, version};
    versions->first = std::min(versions->first, version);
    versions->last = std::max(versions->last, version);
  }
  return versions;
}

std::string to_json(const std::vector<UnfinishedGroup>& groups) {
  Json out = Json::array();
  for (const UnfinishedGroup& group : groups) {
    Json ended = Json::array();
    Json cut = Json::array();
    for (const Trajectory& trajectory : group.ended) ended.push_back(json_of(trajectory));
    for (const Trajectory& trajectory : group.cut) cut.push_back(json_of(trajectory));
    out.push_back(
        {{"row", group.row.row}, {"tokens", group.row.tokens}, {"ended", ended}, {"cut", cut}});
  }
  return out.dump();
}

std::vector<UnfinishedGroup> unfinished_from_json(const std::string& text,
                                                  const std::string& where) {
  std::vector<UnfinishedGroup> out;
  try {
    for (const Json& json : io::parse_json(text, where)) {
      UnfinishedGroup& group = out.emplace_back();
      group.row.row = json.at("row").get<int64_t>();
      json.at("tokens").get_to(group.row.tokens);
      for (const Json& entry : json.at("ended")) {
        group.ended.push_back(trajectory_from(entry, group.row));
      }
      for (const Json& entry : json.at("cut")) {
        group.cut.push_back(trajectory_from(entry, group.row));
      }
    }
  } catch (const Json::exception& error) {
    throw FileError(where + ": unfinished groups: " + error.what());
  }
  return out;
}

}  // namespace banyan::train
