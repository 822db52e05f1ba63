// profile_start, profile_stop and most of bench_*: `banyan bench step`. bench_trie: `banyan bench
// trie`. bench_rates, bench_limit, bench_grouped: `banyan bench rollout`.
#include "banyan/bench/grouped_bench.h"
#include "banyan/bench/machine_rates.h"
#include "banyan/bench/rollout_limit.h"
#include "banyan/bench/scaling_bench.h"
#include "banyan/bench/trie_bench.h"
#include "banyan/bench/workload.h"
#include "banyan/core/profile_report.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

py::dict side_dict(const bench::Side& side) {
  py::dict out;
  out["seconds"] = side.seconds;
  out["median"] = side.median;
  out["cpu_median"] = side.cpu_median;
  out["plan_seconds"] = side.plan_seconds;
  out["modelled_seconds"] = side.modelled_seconds;
  out["blocks"] = side.blocks;
  out["computed_tokens"] = side.computed_tokens;
  out["recomputed_tokens"] = side.recomputed_tokens;
  out["live_tokens"] = side.live_tokens;
  out["carry_bytes"] = side.carry_bytes;
  out["loss"] = side.loss;
  out["grad_norm"] = side.grad_norm;
  return out;
}

py::dict run(models::CausalLM& model, const py::dict& given) {
  bench::TrieBenchOptions options;
  options.preset = given["preset"].cast<std::string>();
  options.seed = get_or<uint64_t>(given, "seed", options.seed);
  options.repeats = get_or<int64_t>(given, "repeats", options.repeats);
  options.off_seconds = get_or<double>(given, "off_seconds", options.off_seconds);
  options.plan.max_tokens_per_block = given["max_tokens_per_block"].cast<int64_t>();
  options.longest_path = get_or<bool>(given, "longest_path", options.longest_path);
  bench::TrieBenchResult result;
  {
    py::gil_scoped_release release;
    result = bench::bench_trie(model, options);
  }
  py::dict out;
  out["ratio"] = result.ratio;
  out["ratio_spread"] = std::vector<double>{result.ratio_low, result.ratio_high};
  out["cpu_ratio"] = result.cpu_ratio;
  out["ideal"] = result.ideal;
  out["efficiency"] = result.efficiency;
  out["auto_shares"] = result.auto_shares;
  out["calibration_seconds"] = result.calibration_seconds;
  out["samples"] = result.samples;
  out["logical_tokens"] = result.logical_tokens;
  out["unique_tokens"] = result.unique_tokens;
  out["pairs_on"] = result.pairs_on;
  out["pairs_off"] = result.pairs_off;
  out["peak_bytes_on"] = result.on.peak_bytes;
  out["peak_bytes_off"] = result.off.peak_bytes;
  out["on"] = side_dict(result.on);
  out["off"] = side_dict(result.off);
  return out;
}

py::dict rates(const models::CausalLM& model, int64_t rows, int64_t repeats) {
  bench::MachineRates rates;
  {
    py::gil_scoped_release release;
    rates = bench::measure_rates(model.shape(), model.options(), rows, repeats);
  }
  py::dict out;
  out["rows"] = rates.rows;
  out["weight_bytes"] = rates.weight_bytes;
  out["bytes_per_s"] = rates.bytes_per_s;
  out["flops_per_s"] = rates.flops_per_s;
  out["packed_flops_per_s"] = rates.packed_flops_per_s;
  out["mm_flops_per_s"] = rates.mm_flops_per_s;
  return out;
}

py::dict limit(const models::CausalLM& model,
               std::vector<int64_t> prompt_tokens,
               int64_t n,
               int64_t new_tokens,
               double flops_per_s,
               double bytes_per_s) {
  const bench::RolloutWork work{std::move(prompt_tokens), n, new_tokens};
  const bench::RolloutCost cost =
      bench::least_cost(bench::model_cost(model.shape()), work, flops_per_s, bytes_per_s);
  py::dict out;
  out["bytes"] = cost.bytes;
  out["flops"] = cost.flops;
  out["decode_seconds"] = cost.decode_seconds;
  out["prompt_seconds"] = cost.prompt_seconds;
  return out;
}

py::dict grouped(models::CausalLM& model, const py::dict& given) {
  bench::GroupedBenchOptions options;
  options.trunk_tokens = get_or(given, "trunk_tokens", options.trunk_tokens);
  options.n = get_or(given, "n", options.n);
  options.new_tokens = get_or(given, "new_tokens", options.new_tokens);
  options.repeats = get_or(given, "repeats", options.repeats);
  bench::GroupedBenchResult result;
  {
    py::gil_scoped_release release;
    result = bench::bench_grouped(model, options);
  }
  const auto side = [](const bench::GroupedSide& side) {
    py::dict out;
    out["seconds"] = side.seconds;
    out["prompt_seconds"] = side.prompt_seconds;
    out["decode_seconds"] = side.decode_seconds;
    return out;
  };
  py::dict out;
  out["trunk_tokens"] = options.trunk_tokens;
  out["n"] = options.n;
  out["new_tokens"] = options.new_tokens;
  out["on"] = side(result.on);
  out["off"] = side(result.off);
  out["ratio"] = result.ratio;
  out["whole_ratio"] = result.whole_ratio;
  return out;
}

py::dict memory(int64_t num_bytes) {
  bench::MemoryRates rates;
  {
    py::gil_scoped_release release;
    rates = bench::measure_memory(num_bytes);
  }
  py::dict out;
  out["read_bytes_per_s"] = rates.read_bytes_per_s;
  out["copy_bytes_per_s"] = rates.copy_bytes_per_s;
  return out;
}

bench::ScalingOptions scaling_options(const py::dict& given) {
  bench::ScalingOptions options;
  options.presets = given["presets"].cast<std::vector<std::string>>();
  options.seed = get_or<uint64_t>(given, "seed", options.seed);
  options.repeats = get_or<int64_t>(given, "repeats", options.repeats);
  options.plan.max_tokens_per_block = get_or<int64_t>(given, "max_tokens_per_block", 0);
  options.plan.max_samples_per_block = get_or<int64_t>(given, "max_samples_per_block", 0);
  return options;
}

std::vector<py::dict> scaling_dicts(const std::vector<bench::ScalingSide>& sides) {
  std::vector<py::dict> out;
  for (const bench::ScalingSide& side : sides) {
    py::dict& entry = out.emplace_back();
    entry["logical_tokens"] = side.logical_tokens;
    entry["unique_tokens"] = side.unique_tokens;
    entry["blocks"] = side.blocks;
    entry["seconds"] = side.seconds;
    entry["median"] = side.median;
  }
  return out;
}

std::vector<py::dict> scaling(models::CausalLM& model, const py::dict& given) {
  const bench::ScalingOptions options = scaling_options(given);
  std::vector<bench::ScalingSide> sides;
  {
    py::gil_scoped_release release;
    sides = bench::bench_scaling(model, options);
  }
  return scaling_dicts(sides);
}

std::vector<py::dict> planning(const models::CausalLM& model, const py::dict& given) {
  const bench::ScalingOptions options = scaling_options(given);
  std::vector<bench::ScalingSide> sides;
  {
    py::gil_scoped_release release;
    sides = bench::bench_planning(model.shape().vocab, options);
  }
  return scaling_dicts(sides);
}

std::vector<py::dict> workload(const models::CausalLM& model,
                               const std::string& preset,
                               uint64_t seed) {
  std::vector<py::dict> out;
  const auto vocab = static_cast<int32_t>(model.shape().vocab);
  for (const Sample& sample : bench::make_workload(preset, vocab, seed)) {
    py::dict& entry = out.emplace_back();
    entry["tokens"] = sample.tokens;
    entry["scored"] = std::vector<int>(sample.scored.begin(), sample.scored.end());
  }
  return out;
}

std::vector<py::dict> stop_profile(const std::optional<std::string>& trace) {
  const std::vector<profile::Event> events = profile::stop();
  if (trace) profile::write_trace(events, *trace);
  std::vector<py::dict> out;
  for (const profile::Row& row : profile::table(events)) {
    py::dict& entry = out.emplace_back();
    entry["op"] = row.name;
    entry["phase"] = profile::phase_name(row.phase);
    entry["calls"] = row.calls;
    entry["seconds"] = row.seconds;
    entry["flops"] = row.flops;
    entry["repeated_flops"] = row.repeated;
    entry["bytes"] = row.bytes;
  }
  return out;
}

}  // namespace

void bind_bench(py::module_& module) {
  module.def("bench_presets", &bench::preset_names, "Names that `banyan bench trie` measures.");
  module.def("bench_trie",
             &run,
             py::arg("model"),
             py::arg("options"),
             "Times one preset with sharing on and off; the model needs with_backward.");
  module.def("bench_rates",
             &rates,
             py::arg("model"),
             py::arg("rows") = 64,
             py::arg("repeats") = 5,
             "Measures how fast this machine multiplies and reads weights of the model's shapes.");
  module.def("bench_limit",
             &limit,
             py::arg("model"),
             py::arg("prompt_tokens"),
             py::arg("n"),
             py::arg("new_tokens"),
             py::arg("flops_per_s"),
             py::arg("bytes_per_s"),
             "Bytes, FLOPs and least seconds of a rollout at these rates.");
  module.def("bench_memory",
             &memory,
             py::arg("num_bytes") = int64_t{256} << 20,
             "Bytes per second that this machine reads and copies beyond its caches.");
  module.def("bench_matrix_rate",
             &bench::measure_matrix_rate,
             py::arg("tries") = 20,
             py::call_guard<py::gil_scoped_release>(),
             "FLOP/s of at::mm on bf16 [2048, 1536] x [1536, 1536], the best of `tries`.");
  module.def("bench_scaling",
             &scaling,
             py::arg("model"),
             py::arg("options"),
             "Times forward and backward over batches of different sizes, in turn.");
  module.def("bench_planning",
             &planning,
             py::arg("model"),
             py::arg("options"),
             "Times trie build and planning alone.");
  module.def("bench_workload",
             &workload,
             py::arg("model"),
             py::arg("preset"),
             py::arg("seed") = 1,
             "Samples of a preset of `banyan bench trie`: tokens, and which are scored.");
  module.def("profile_start", &profile::start, "Records every op from now on (core/profile.h).");
  module.def("profile_stop",
             &stop_profile,
             py::arg("trace") = std::nullopt,
             "Ends the recording: rows of the table of ops; the trace goes to the file `trace`.");
  module.def("bench_grouped",
             &grouped,
             py::arg("model"),
             py::arg("options") = py::dict(),
             "Times one long trunk with n responses, with and without grouped attention.");
}

}  // namespace banyan::bindings
