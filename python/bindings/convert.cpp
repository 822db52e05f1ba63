#include "convert.h"

#include "banyan/core/error.h"
#include "engine_convert.h"

namespace banyan::bindings {
namespace {

FinishReason finish_from(const std::string& name) {
  if (name == "stop") return FinishReason::kStop;
  if (name == "length") return FinishReason::kLength;
  if (name == "repetition") return FinishReason::kRepetition;
  BANYAN_CHECK(name == "abort",
               "[trajectory] finish: wanted stop, length, repetition or abort, got '",
               name,
               "'");
  return FinishReason::kAbort;
}

}  // namespace

const char* finish_name(FinishReason finish) {
  switch (finish) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kRepetition:
      return "repetition";
  }
  return "abort";
}

py::dict to_dict(const Trajectory& trajectory) {
  py::dict out;
  out["row"] = trajectory.row;
  out["index"] = trajectory.index;
  out["prompt"] = trajectory.prompt;
  out["response"] = trajectory.response;
  out["response_mask"] =
      std::vector<int>(trajectory.response_mask.begin(), trajectory.response_mask.end());
  out["rollout_log_probs"] = trajectory.rollout_log_probs;
  if (!trajectory.sampled_log_probs.empty()) {
    out["sampled_log_probs"] = trajectory.sampled_log_probs;
  }
  if (!trajectory.weight_spans.empty()) out["weight_spans"] = to_list(trajectory.weight_spans);
  if (trajectory.reward_model_score) out["reward_model_score"] = *trajectory.reward_model_score;
  out["finish"] = finish_name(trajectory.finish);
  return out;
}

Trajectory trajectory_from(const py::dict& value) {
  Trajectory out;
  out.row = value["row"].cast<int64_t>();
  out.index = value["index"].cast<int32_t>();
  out.prompt = value["prompt"].cast<std::vector<int32_t>>();
  out.response = value["response"].cast<std::vector<int32_t>>();
  if (value.contains("response_mask")) {
    for (const int bit : value["response_mask"].cast<std::vector<int>>()) {
      out.response_mask.push_back(bit != 0 ? 1 : 0);
    }
  } else {
    out.response_mask.assign(out.response.size(), 1);
  }
  BANYAN_CHECK(out.response_mask.size() == out.response.size(),
               "[trajectory] response_mask: wanted ",
               out.response.size(),
               " entries, got ",
               out.response_mask.size());
  out.rollout_log_probs = get_or<std::vector<float>>(
      value, "rollout_log_probs", std::vector<float>(out.response.size(), 0.0f));
  out.sampled_log_probs =
      get_or<std::vector<float>>(value, "sampled_log_probs", std::vector<float>());
  out.finish = finish_from(get_or<std::string>(value, "finish", "stop"));
  for (const py::dict& span :
       get_or<std::vector<py::dict>>(value, "weight_spans", std::vector<py::dict>())) {
    out.weight_spans.push_back({.epoch = span["epoch"].cast<int64_t>(),
                                .version = span["version"].cast<std::string>(),
                                .start = span["start"].cast<int32_t>(),
                                .end = span["end"].cast<int32_t>()});
  }
  return out;
}

py::dict to_dict(const Score& score) {
  py::dict out;
  out["row"] = score.row;
  out["index"] = score.index;
  out["failed"] = score.failed;
  out["reason"] = score.reason;
  out["value"] = score.value;
  py::dict extra;
  for (const auto& [name, entry] : score.extra) extra[py::str(name)] = entry;
  out["extra"] = extra;
  py::dict texts;
  for (const auto& [name, text] : score.texts) texts[py::str(name)] = text;
  out["texts"] = texts;
  return out;
}

Score score_from(const py::dict& value) {
  Score out;
  out.row = value["row"].cast<int64_t>();
  out.index = value["index"].cast<int32_t>();
  out.failed = get_or<bool>(value, "failed", false);
  out.reason = get_or<std::string>(value, "reason", "");
  out.value = value["value"].cast<double>();
  if (value.contains("extra")) {
    for (const auto& [name, entry] : value["extra"].cast<std::map<std::string, double>>()) {
      out.extra.emplace_back(name, entry);
    }
  }
  if (value.contains("texts")) {
    for (const auto& [name, text] : value["texts"].cast<std::map<std::string, std::string>>()) {
      out.texts.emplace_back(name, text);
    }
  }
  return out;
}

}  // namespace banyan::bindings
