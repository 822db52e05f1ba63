// Trie build and planning on batches of about a million logical tokens, one thread. Argument: the
// largest block. Counters: logical and unique tokens, blocks, time of a logical token.
#include <benchmark/benchmark.h>

#include "banyan/bench/workload.h"
#include "banyan/trie/plan.h"

namespace {

// Groups of one preset, apart in their first token.
std::vector<banyan::Sample> batch(const char* preset, int64_t groups) {
  constexpr int32_t kVocab = 49152;
  std::vector<banyan::Sample> samples;
  for (int64_t group = 0; group < groups; ++group) {
    for (banyan::Sample& sample : banyan::bench::make_workload(preset, kVocab, group)) {
      sample.tokens[0] = static_cast<int32_t>(group);
      sample.uid = static_cast<int64_t>(samples.size());
      samples.push_back(std::move(sample));
    }
  }
  return samples;
}

void plan(benchmark::State& state, const char* preset, int64_t groups) {
  const std::vector<banyan::Sample> samples = batch(preset, groups);
  banyan::trie::PlanOptions options;
  options.max_tokens_per_block = state.range(0);
  banyan::trie::Plan plan;
  for (auto _ : state) {
    plan = banyan::trie::plan(samples, options);
    benchmark::DoNotOptimize(plan.num_computed);
  }
  const auto logical = static_cast<double>(plan.num_logical);
  state.counters["logical"] = logical;
  state.counters["unique"] = static_cast<double>(plan.num_unique);
  state.counters["blocks"] = static_cast<double>(plan.blocks.size());
  state.counters["per_token"] = benchmark::Counter(
      logical, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void short_groups(benchmark::State& state) { plan(state, "P100R128n8", 550); }
void short_groups_half(benchmark::State& state) { plan(state, "P100R128n8", 275); }
void long_prompts(benchmark::State& state) { plan(state, "P4kR256n16", 15); }
void chats(benchmark::State& state) { plan(state, "turns60n5", 1); }

BENCHMARK(short_groups_half)->Arg(8192)->Unit(benchmark::kMillisecond);
BENCHMARK(short_groups)->Arg(8192)->Arg(2048)->Unit(benchmark::kMillisecond);
BENCHMARK(long_prompts)->Arg(8192)->Unit(benchmark::kMillisecond);
BENCHMARK(chats)->Arg(8192)->Unit(benchmark::kMillisecond);

}  // namespace
