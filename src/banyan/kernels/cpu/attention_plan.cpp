// How attention over tiles is cut into work items.
//
// A span of r rows against one tile costs tile + r row, both measured once; a block's item is the
// sum over its spans, and the threads take items in order. Among block sizes the one is chosen
// whose last thread is done first.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <vector>

#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/vecmath.h"

namespace banyan::kernels {
namespace {

constexpr int64_t kBlockRows = 96;      // of a work item, at most
constexpr int64_t kFewTokens = 256;     // more are cut into the largest blocks
constexpr int64_t kItemsPerThread = 6;  // most that are considered

struct Costs {
  double tile = 0.0;  // seconds for a tile that a span reads
  double row = 0.0;   // and for each of its rows
};

// Seconds of attending kTiles tiles by `tokens` tokens that share them, the best of a few.
double time_span(const AttentionShape& shape, int64_t tokens) {
  constexpr int32_t kTiles = 8;
  const AttentionShape one{.num_heads = shape.group(),
                           .num_kv_heads = 1,
                           .head_dim = shape.head_dim,
                           .scale = shape.scale};
  std::vector<uint16_t> tiles(kTiles * tile_elements(shape.head_dim), f32_to_bf16(0.25f));
  std::vector<uint16_t> q(tokens * one.num_heads * one.head_dim, f32_to_bf16(0.5f));
  std::vector<uint16_t> out(q.size());
  std::vector<int32_t> list(kTiles);
  for (int32_t i = 0; i < kTiles; ++i) list[i] = i;
  const std::vector<const int32_t*> lists(tokens, list.data());
  const std::vector<int32_t> visible(tokens, kTiles * static_cast<int32_t>(kTileTokens));
  const AttendInput input{.shape = one,
                          .num_tokens = tokens,
                          .q = q.data(),
                          .q_stride = one.num_heads * one.head_dim,
                          .tiles = tiles.data(),
                          .tile_lists = lists.data(),
                          .visible = visible.data()};
  const AttendPlan plan{.block_tokens = tokens, .num_blocks = 1, .num_items = 1};
  Scratch memory;
  void* scratch = memory.get<std::byte>(attend_scratch_bytes(one, tokens));
  double best = 1.0;
  for (int i = 0; i < 6; ++i) {
    const auto start = std::chrono::steady_clock::now();
    attend_item(input, plan, 0, scratch, out.data(), /*lse=*/nullptr);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count() / kTiles);
  }
  return best;
}

Costs measured_costs(const AttentionShape& shape) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, int64_t>, Costs> known;
  const std::scoped_lock lock(mutex);
  Costs& costs = known[{shape.head_dim, shape.group()}];
  if (costs.row == 0.0) {
    constexpr int64_t kMany = 16;
    const double alone = time_span(shape, 1);
    const double together = time_span(shape, kMany);
    const double per_token = std::max((together - alone) / (kMany - 1), 1e-9);
    costs.row = per_token / static_cast<double>(shape.group());
    costs.tile = std::max(alone - per_token, 0.0);
  }
  return costs;
}

// Cost of tokens [begin, end) for one kv head.
double block_cost(const AttendInput& input, const Costs& costs, int64_t begin, int64_t end) {
  int64_t spans = 0;
  int64_t tokens = 0;
  int32_t longest = 0;
  for (int64_t t = begin; t < end; ++t) longest = std::max(longest, input.visible[t]);
  for (int64_t j = 0; j * kTileTokens < longest; ++j) {
    int32_t last = -1;
    for (int64_t t = begin; t < end; ++t) {
      const bool sees = input.visible[t] > j * kTileTokens;
      const int32_t tile = sees ? input.tile_lists[t][j] : -1;
      tokens += sees;
      spans += sees && tile != last;
      last = tile;
    }
  }
  const auto group = static_cast<double>(input.shape.group());
  return costs.tile * static_cast<double>(spans) + costs.row * group * static_cast<double>(tokens);
}

// When the last of the threads is done.
double makespan(const AttendInput& input, const Costs& costs, int64_t blocks, int64_t threads) {
  const int64_t size = divide_up(input.num_tokens, blocks);
  std::vector<double> cost;
  for (int64_t begin = 0; begin < input.num_tokens; begin += size) {
    cost.push_back(block_cost(input, costs, begin, std::min(begin + size, input.num_tokens)));
  }
  std::vector<double> busy(threads, 0.0);
  for (int64_t head = 0; head < input.shape.num_kv_heads; ++head) {
    for (const double item : cost) *std::min_element(busy.begin(), busy.end()) += item;
  }
  return *std::max_element(busy.begin(), busy.end());
}

int64_t choose_blocks(const AttendInput& input, int64_t least, int64_t threads) {
  const int64_t heads = input.shape.num_kv_heads;
  const int64_t most =
      std::min(input.num_tokens, std::max(least, divide_up(kItemsPerThread * threads, heads)));
  if (threads == 1 || least >= most) return least;
  const Costs costs = measured_costs(input.shape);
  int64_t best = least;
  double best_time = 1e30;
  for (int64_t blocks = least; blocks <= most; ++blocks) {
    const double time = makespan(input, costs, blocks, threads);
    if (time < best_time) {
      best = blocks;
      best_time = time;
    }
  }
  return best;
}

}  // namespace

AttendPlan attend_plan(const AttendInput& input, int64_t threads) {
  const AttentionShape& shape = input.shape;
  const bool alone = input.runs != nullptr;  // every sequence by itself
  const int64_t largest = std::max<int64_t>(1, kBlockRows / shape.group());
  const int64_t least = divide_up(input.num_tokens, largest);
  AttendPlan plan;
  const bool enough = input.num_tokens >= 2 * threads;  // sequences for all threads
  plan.heads_per_item = alone && enough ? shape.num_kv_heads : 1;
  int64_t blocks = least;
  if (alone) {
    blocks = std::clamp(kItemsPerThread * threads, least, std::max(least, input.num_tokens));
  } else if (input.num_tokens <= kFewTokens) {
    blocks = choose_blocks(input, least, threads);
  }
  plan.block_tokens = divide_up(input.num_tokens, blocks);
  plan.num_blocks = divide_up(input.num_tokens, plan.block_tokens);
  plan.num_items = plan.num_blocks * (shape.num_kv_heads / plan.heads_per_item);
  plan.scratch_bytes = attend_scratch_bytes(shape, plan.block_tokens);
  return plan;
}

}  // namespace banyan::kernels
