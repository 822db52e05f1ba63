// Sampling: parameters, their limits, token tables, and rows of logits drawn outside an engine.
#include <pybind11/numpy.h>

#include "banyan/core/error.h"
#include "banyan/rollout/grammar/grammar.h"
#include "banyan/rollout/sampling/limits.h"
#include "banyan/rollout/sampling/outlines_index.h"
#include "banyan/rollout/sampling/row_sampler.h"
#include "banyan/rollout/sampling/token_table.h"
#include "engine_convert.h"

namespace banyan::bindings {

using rollout::SamplingParams;
using rollout::TokenTable;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
std::vector<T> vector_of(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

py::list top_list(const std::vector<rollout::TokenLogprob>& top) {
  py::list out;
  for (const auto& entry : top) out.append(py::make_tuple(entry.token, entry.logprob, entry.rank));
  return out;
}

py::dict to_dict(const rollout::Limit& limit) {
  const auto range = [](const rollout::Range& r) { return py::make_tuple(r.low, r.high); };
  py::dict out;
  out["name"] = limit.name;
  out["integer"] = limit.integer;
  out["above_low"] = limit.above_low;
  out["engine"] = range(limit.engine);
  out["openai"] = range(limit.openai);
  out["sglang"] = range(limit.sglang);
  out["note"] = limit.note;
  return out;
}

py::dict sample_row(rollout::RowSampler& sampler,
                    const py::dict& request,
                    const std::vector<std::string>& token_bytes) {
  const SamplingParams params = sampling_params(request["params"].cast<py::dict>());
  const auto prompt = request["prompt"].cast<std::vector<int32_t>>();
  const rollout::SamplingPlan plan(
      params, prompt, get_or<int32_t>(request, "original_prompt", 0), token_bytes);
  rollout::ResponseState state(plan);
  for (const auto token : request["response"].cast<std::vector<int32_t>>()) state.append(token);
  rollout::Drawn drawn;
  sampler.draw(state, request["uniform"].cast<float>(), /*with_raw=*/true, drawn);
  py::dict out;
  out["drawn"] = drawn.status == rollout::DrawStatus::kDrawn;
  out["token"] = drawn.record.token;
  out["logprob"] = drawn.logprob;
  out["raw"] = drawn.record.raw;
  out["processed"] = drawn.record.processed;
  out["log_kept_mass"] = drawn.record.log_kept_mass;
  out["top"] = top_list(drawn.record.top);
  out["sampling_mask"] = drawn.record.sampling_mask;
  return out;
}

py::list sample_rows(const Array<float>& logits,
                     const std::vector<py::dict>& requests,
                     const std::vector<std::string>& token_bytes) {
  BANYAN_CHECK(logits.ndim() == 2 && logits.shape(0) == static_cast<int64_t>(requests.size()),
               "[sample_rows] logits: wanted [",
               requests.size(),
               ", V], one row per request");
  std::vector<float> rows = vector_of(logits);
  const auto vocab = static_cast<int32_t>(logits.shape(1));
  rollout::RowSampler sampler(vocab);
  py::list out;
  for (size_t r = 0; r < requests.size(); ++r) {
    sampler.load(rows.data() + r * vocab);
    out.append(sample_row(sampler, requests[r], token_bytes));
  }
  return out;
}

}  // namespace

void bind_sampling(py::module_& module) {
  py::class_<TokenTable, std::shared_ptr<TokenTable>>(
      module, "TokenTable", "A finite automaton over tokens, for structured output. Immutable.")
      .def(py::init([](const Array<int64_t>& offsets,
                       const Array<int32_t>& tokens,
                       const Array<int32_t>& targets,
                       const Array<uint8_t>& is_final) {
             return std::make_shared<TokenTable>(
                 vector_of(offsets), vector_of(tokens), vector_of(targets), vector_of(is_final));
           }),
           py::arg("offsets"),
           py::arg("tokens"),
           py::arg("targets"),
           py::arg("is_final"),
           "State s leads on by tokens[offsets[s]:offsets[s + 1]], ascending, to the targets in "
           "the same places. State 0 is the start; in a final state EOS may follow.")
      .def_static(
          "from_outlines",
          [](const py::bytes& index, int32_t end_token, int64_t max_bytes) {
            const auto view = static_cast<std::string_view>(index);
            py::gil_scoped_release release;
            return std::make_shared<TokenTable>(
                rollout::read_outlines_index(view, end_token, max_bytes));
          },
          py::arg("index"),
          py::arg("end_token"),
          py::arg("max_bytes"),
          "From an Index of outlines_core 0.2 as it serialises it; `end_token` is the id that "
          "stands "
          "for the end of the text there.")
      .def_static(
          "from_ebnf",
          [](const std::string& ebnf, const std::vector<std::string>& token_bytes, int64_t most) {
            py::gil_scoped_release release;
            return std::make_shared<TokenTable>(rollout::compile_grammar(ebnf, token_bytes, most));
          },
          py::arg("ebnf"),
          py::arg("token_bytes"),
          py::arg("max_bytes"),
          "From a grammar with a rule root, in the notation of llama.cpp and XGrammar; "
          "`token_bytes`: what each id writes.")
      .def_static(
          "json_object",
          [](const std::vector<std::string>& token_bytes, int64_t most) {
            py::gil_scoped_release release;
            return std::make_shared<TokenTable>(rollout::compile_grammar(
                rollout::kJsonObject, token_bytes, most, rollout::kJsonDepth - 1));
          },
          py::arg("token_bytes"),
          py::arg("max_bytes"),
          "Any JSON object, containers at most five deep.")
      .def_property_readonly("num_states", &TokenTable::num_states)
      .def_property_readonly("num_bytes", &TokenTable::num_bytes, "Memory it takes.")
      .def("is_final", &TokenTable::is_final, py::arg("state"))
      .def("next",
           &TokenTable::next,
           py::arg("state"),
           py::arg("token"),
           "The state after `token`; -1 if it may not follow.")
      .def(
          "allowed",
          [](const TokenTable& table, int32_t state) {
            return std::vector<int32_t>(table.begin(state), table.end(state));
          },
          py::arg("state"),
          "Tokens that may follow, ascending.");
  module.def(
      "sampling_limits",
      [] {
        py::list out;
        for (const rollout::Limit& limit : rollout::sampling_limits()) out.append(to_dict(limit));
        return out;
      },
      "What each sampling parameter may be: in the engine, on OpenAI routes, on SGLang's.");
  module.def("sample_rows",
             &sample_rows,
             py::arg("logits"),
             py::arg("requests"),
             py::arg("token_bytes") = std::vector<std::string>(),
             "Draws one token from each row of logits [B, V]. A request holds `params`, `prompt`, "
             "`response` so far and `uniform`.");
}

}  // namespace banyan::bindings
