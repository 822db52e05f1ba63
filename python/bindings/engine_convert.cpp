#include "engine_convert.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include "banyan/core/error.h"
#include "banyan/rollout/sampling/token_table.h"
#include "fields.h"

namespace banyan::bindings {
namespace {

using rollout::RequestError;

struct ModeName {
  const char* name;
  rollout::PauseMode mode;
};
constexpr std::array<ModeName, 4> kModes = {{{"abort", rollout::PauseMode::kAbort},
                                             {"wait", rollout::PauseMode::kWait},
                                             {"keep", rollout::PauseMode::kKeep},
                                             {"retract", rollout::PauseMode::kRetract}}};

rollout::SchedulingPolicy policy_from(const std::string& name) {
  if (name == "group") return rollout::SchedulingPolicy::kGroup;
  if (name == "fcfs") return rollout::SchedulingPolicy::kFcfs;
  if (name == "priority") return rollout::SchedulingPolicy::kPriority;
  throw RequestError(
      400, "policy", "[rollout] policy: wanted group, fcfs or priority, got '" + name + "'");
}

const char* name_of(rollout::EngineState state) {
  switch (state) {
    case rollout::EngineState::kStopped:
      return "stopped";
    case rollout::EngineState::kRunning:
      return "running";
    case rollout::EngineState::kPausing:
      return "pausing";
    case rollout::EngineState::kPaused:
      return "paused";
    case rollout::EngineState::kAsleep:
      return "asleep";
  }
  return "";
}

rollout::RepetitionDetection repetition_from(const py::dict& from) {
  rollout::RepetitionDetection out;
  Fields fields(from, "field of repetition_detection");
  fields.read("max_pattern", out.max_pattern);
  fields.read("min_pattern", out.min_pattern);
  fields.read("min_count", out.min_count);
  fields.finish();
  return out;
}

// {id: bias}, in the order of the dict.
void read_logit_bias(Fields& fields, std::vector<std::pair<int32_t, float>>& into) {
  const py::object value = fields.find("logit_bias");
  if (value.is_none()) return;
  try {
    for (const auto& [id, bias] : value.cast<py::dict>()) {
      into.emplace_back(id.cast<int32_t>(), bias.cast<float>());
    }
  } catch (const py::cast_error&) {
    fields.refuse_value("logit_bias", value);
  }
}

// Python's integers of 64 bits, with or without a sign.
void read_seed(Fields& fields, uint64_t& into) {
  const py::object value = fields.find("seed");
  if (value.is_none()) return;
  try {
    into = value.cast<uint64_t>();
  } catch (const py::cast_error&) {
    int64_t negative = 0;
    try {
      negative = value.cast<int64_t>();
    } catch (const py::cast_error&) {
      fields.refuse_value("seed", value);
    }
    into = static_cast<uint64_t>(negative);
  }
}

py::list triples(const std::vector<rollout::TokenLogprob>& values) {
  py::list out(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    out[i] = py::make_tuple(values[i].token, values[i].logprob, values[i].rank);
  }
  return out;
}

// One column of an event's tokens.
template <typename Get>
py::list column(const std::vector<rollout::TokenRecord>& tokens, const Get& get) {
  py::list out(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) out[i] = get(tokens[i]);
  return out;
}

// By what they were made of.
using PromptLists = std::unordered_map<const rollout::PromptLogprobs*, py::list>;

py::object prompt_list(const rollout::Event& event, PromptLists& made) {
  if (!event.prompt_logprobs) return py::none();
  const auto [place, is_new] = made.try_emplace(event.prompt_logprobs.get());
  if (is_new) {
    for (const auto& values : *event.prompt_logprobs) place->second.append(triples(values));
  }
  return place->second;
}

void add_end(const rollout::Event& event, PromptLists& made, py::dict& out) {
  out["finish"] =
      event.error.empty() ? py::object(py::str(finish_name(event.finish))) : py::object(py::none());
  out["stop_token"] =
      event.stop_token < 0 ? py::object(py::none()) : py::object(py::int_(event.stop_token));
  out["stop_string"] =
      event.stop_string < 0 ? py::object(py::none()) : py::object(py::int_(event.stop_string));
  out["error"] = event.error;
  out["prompt_tokens"] = event.prompt_tokens;
  out["cached_tokens"] = event.cached_tokens;
  out["num_retractions"] = event.num_retractions;
  out["queue_seconds"] = event.queue_seconds;
  out["spans"] = to_list(event.spans);
  out["prompt_logprobs"] = prompt_list(event, made);
}

py::dict event_dict(const rollout::Event& event, PromptLists& made) {
  const std::vector<rollout::TokenRecord>& tokens = event.tokens;
  py::dict out;
  out["request"] = event.request;
  out["index"] = event.index;
  out["tokens"] = column(tokens, [](const auto& t) { return py::int_(t.token); });
  out["raw"] = column(tokens, [](const auto& t) { return py::float_(t.raw); });
  out["processed"] = column(tokens, [](const auto& t) { return py::float_(t.processed); });
  out["log_kept_mass"] = column(tokens, [](const auto& t) { return py::float_(t.log_kept_mass); });
  const auto any = [&](auto has) { return std::any_of(tokens.begin(), tokens.end(), has); };
  out["top"] = py::none();
  if (any([](const auto& t) { return !t.top.empty(); })) {
    out["top"] = column(tokens, [](const auto& t) { return triples(t.top); });
  }
  out["sampling_mask"] = py::none();
  if (any([](const auto& t) { return !t.sampling_mask.empty(); })) {
    out["sampling_mask"] = column(tokens, [](const auto& t) { return py::cast(t.sampling_mask); });
  }
  out["finished"] = event.finished;
  if (event.finished) add_end(event, made, out);
  return out;
}

}  // namespace

rollout::EngineOptions engine_options(const py::dict& from) {
  rollout::EngineOptions options;
  Fields fields(from, "engine option");
  fields.read("max_num_seqs", options.max_num_seqs);
  fields.read("max_num_batched_tokens", options.max_num_batched_tokens);
  fields.read("kv_bytes", options.kv_bytes);
  fields.read("memory_share", options.memory_share);
  fields.read("mem_fraction_static", options.mem_fraction_static);
  fields.read("host_kv_bytes", options.host_kv_bytes);
  fields.read("max_model_len", options.max_model_len);
  fields.read("share_prefix", options.share_prefix);
  fields.read("enable_chunked_prefill", options.enable_chunked_prefill);
  fields.read("long_prefill_token_threshold", options.long_prefill_token_threshold);
  fields.read("prefill_schedule_interval", options.prefill_schedule_interval);
  fields.read("watermark", options.watermark);
  fields.read("schedule_conservativeness", options.schedule_conservativeness);
  std::string policy;
  fields.read("policy", policy);
  if (!policy.empty()) options.policy = policy_from(policy);
  fields.read("max_num_queued_reqs", options.max_num_queued_reqs);
  fields.read("max_num_queued_tokens", options.max_num_queued_tokens);
  fields.read("grouped_attention", options.grouped_attention);
  fields.read("keep_pool", options.keep_pool);
  fields.read("max_undrained_bytes", options.max_undrained_bytes);
  fields.finish();
  return options;
}

rollout::SamplingParams sampling_params(const py::dict& from) {
  rollout::SamplingParams params;
  Fields fields(from, "sampling parameter");
  fields.read("temperature", params.temperature);
  fields.read("top_p", params.top_p);
  fields.read("top_k", params.top_k);
  fields.read("top_k_ties", params.top_k_ties);
  fields.read("min_p", params.min_p);
  fields.read("repetition_penalty", params.repetition_penalty);
  fields.read("presence_penalty", params.presence_penalty);
  fields.read("frequency_penalty", params.frequency_penalty);
  read_logit_bias(fields, params.logit_bias);
  fields.read("bad_words", params.bad_words);
  fields.read("allowed_token_ids", params.allowed_token_ids);
  std::shared_ptr<rollout::TokenTable> grammar;
  fields.read("grammar", grammar);
  params.grammar = std::move(grammar);
  fields.read("max_tokens", params.max_tokens);
  fields.read("min_tokens", params.min_tokens);
  fields.read("eos_ids", params.eos_ids);
  fields.read("stop_token_ids", params.stop_token_ids);
  fields.read("stop", params.stop);
  fields.read("ignore_eos", params.ignore_eos);
  py::dict repetition;
  fields.read("repetition_detection", repetition);
  if (!repetition.empty()) params.repetition_detection = repetition_from(repetition);
  read_seed(fields, params.seed);
  fields.read("step", params.step);
  fields.read("top_logprobs", params.top_logprobs);
  fields.read("logprob_token_ids", params.logprob_token_ids);
  fields.read("prompt_logprobs", params.prompt_logprobs);
  fields.read("return_sampling_mask", params.return_sampling_mask);
  fields.read("processed_logprobs", params.processed_logprobs);
  fields.finish();
  return params;
}

rollout::Request request_from(const py::dict& from) {
  rollout::Request request;
  Fields fields(from, "field of a request");
  fields.read("id", request.id);
  fields.read("prompt", request.prompt);
  fields.read("n", request.n);
  py::dict params;
  fields.read("params", params);
  request.params = sampling_params(params);
  fields.read("row", request.row);
  fields.read("first_index", request.first_index);
  fields.read("original_prompt", request.original_prompt);
  fields.read("priority", request.priority);
  fields.read("cache_salt", request.cache_salt);
  fields.read("source", request.source);
  fields.read("group_id", request.group_id);
  fields.finish();
  return request;
}

rollout::Prompt prompt_from(const py::dict& from) {
  rollout::Prompt prompt;
  Fields fields(from, "field of a prompt");
  fields.read("row", prompt.row);
  fields.read("tokens", prompt.tokens);
  fields.read("n", prompt.n);
  fields.read("first_index", prompt.first_index);
  fields.read("original_prompt", prompt.original_prompt);
  fields.finish();
  return prompt;
}

rollout::PauseMode pause_mode(const std::string& name) {
  for (const ModeName& mode : kModes) {
    if (name == mode.name) return mode.mode;
  }
  throw RequestError(
      400,
      "mode",
      "[rollout] mode: wanted abort, wait, keep or retract, got '" + name.substr(0, 80) + "'");
}

py::list to_list(const std::vector<WeightSpan>& spans) {
  py::list out;
  for (const WeightSpan& span : spans) {
    py::dict entry;
    entry["epoch"] = span.epoch;
    entry["version"] = span.version;
    entry["start"] = span.start;
    entry["end"] = span.end;
    out.append(entry);
  }
  return out;
}

py::list to_list(const std::vector<rollout::Event>& events) {
  PromptLists made;
  py::list out(events.size());
  for (size_t i = 0; i < events.size(); ++i) out[i] = event_dict(events[i], made);
  return out;
}

py::dict to_dict(const rollout::EngineStats& stats) {
  py::dict out;
  out["state"] = name_of(stats.state);
  out["running"] = stats.running;
  out["waiting"] = stats.waiting;
  out["groups_running"] = stats.groups_running;
  out["num_pages"] = stats.num_pages;
  out["used_pages"] = stats.used_pages;
  out["cached_pages"] = stats.cached_pages;
  out["weight_epoch"] = stats.weight_epoch;
  out["weight_version"] = stats.weight_version;
  out["weights_missing"] = stats.weights_missing;
  out["counters"] = py::cast(stats.counters);
  out["seconds"] = py::cast(stats.seconds);
  return out;
}

py::dict to_dict(const rollout::GenerateStats& stats) {
  py::dict out;
  out["logical_prompt_tokens"] = stats.logical_prompt_tokens;
  out["computed_prompt_tokens"] = stats.computed_prompt_tokens;
  out["response_tokens"] = stats.response_tokens;
  out["num_passes"] = stats.num_passes;
  out["num_preemptions"] = stats.num_preemptions;
  out["seconds"] = stats.seconds;
  return out;
}

}  // namespace banyan::bindings
