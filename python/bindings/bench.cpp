// bench_trie: `banyan bench trie`.
#include "banyan/bench/trie_bench.h"
#include "banyan/bench/workload.h"
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

}  // namespace

void bind_bench(py::module_& module) {
  module.def("bench_presets", &bench::preset_names, "Names that `banyan bench trie` measures.");
  module.def("bench_trie",
             &run,
             py::arg("model"),
             py::arg("options"),
             "Times one preset with sharing on and off; the model needs with_backward.");
}

}  // namespace banyan::bindings
