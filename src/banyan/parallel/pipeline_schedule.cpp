#include "banyan/parallel/pipeline_schedule.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

using trie::Action;

// What the entries of a plan say about the order of things.
struct Order {
  std::vector<int32_t> forwards;                    // blocks
  std::vector<int32_t> backwards;                   // blocks
  std::vector<int64_t> needed;                      // n_k, per backward
  std::vector<std::pair<int64_t, int32_t>> losses;  // after so many forwards: that of this block
  std::vector<std::optional<int32_t>> recomputes;   // per backward: of which block, if one
};

Order order_of(const std::vector<trie::Entry>& entries) {
  Order order;
  const auto num_forwards = [&] { return static_cast<int64_t>(order.forwards.size()); };
  std::optional<int32_t> recompute;  // of the next backward
  for (const trie::Entry& entry : entries) {
    switch (entry.action) {
      case Action::kForward:
        order.forwards.push_back(entry.block);
        break;
      case Action::kLoss:
        order.losses.emplace_back(num_forwards(), entry.block);
        break;
      case Action::kRecompute:
        recompute = entry.block;
        break;
      case Action::kBackward:
        order.backwards.push_back(entry.block);
        order.recomputes.push_back(std::exchange(recompute, std::nullopt));
        order.needed.push_back(num_forwards());
        break;
    }
  }
  return order;
}

// A place in the order of blocks, and a chunk.
struct Item {
  int64_t place = 0;
  int32_t chunk = 0;
};

// Sizes of the groups that pass the chunks together.
std::vector<int64_t> groups_of(int64_t count, int64_t size) {
  if (count < 2 * size) return {count};
  std::vector<int64_t> groups(count / size, size);
  groups.front() += count % size;
  return groups;
}

std::vector<Item> items_of(size_t count, int64_t num_ranks, int64_t num_chunks, bool backwards) {
  std::vector<Item> items;
  int64_t first = 0;
  for (const int64_t size : groups_of(static_cast<int64_t>(count), num_ranks)) {
    for (int64_t c = 0; c < num_chunks; ++c) {
      const auto chunk = static_cast<int32_t>(backwards ? num_chunks - 1 - c : c);
      for (int64_t i = 0; i < size; ++i) items.push_back({first + i, chunk});
    }
    first += size;
  }
  return items;
}

// The lists that all ranks go through, and how far the last one is in the forwards at each
// backward.
struct Lists {
  Order order;
  int64_t num_chunks = 1;
  std::vector<Item> forwards;
  std::vector<Item> backwards;
  std::vector<int64_t> wanted;  // forwards of the last rank before each of its backwards

  bool is_last_chunk(const Item& item) const { return item.chunk == num_chunks - 1; }
};

std::vector<int64_t> wanted_forwards(const Lists& lists) {
  const Order& order = lists.order;
  std::vector<int64_t> through(order.forwards.size() + 1, 0);  // n blocks through the last chunk
  for (size_t i = 0; i < lists.forwards.size(); ++i) {
    const Item& item = lists.forwards[i];
    if (lists.is_last_chunk(item)) through[item.place + 1] = static_cast<int64_t>(i) + 1;
  }
  std::vector<int64_t> wanted;
  int64_t before = 0;
  int64_t blocks_before = 0;
  for (const Item& item : lists.backwards) {
    if (lists.is_last_chunk(item)) {
      const int64_t blocks = order.needed[item.place];
      const int64_t more = blocks > blocks_before ? 1 : 0;
      before = std::max(before + (wanted.empty() ? 0 : more), through[blocks]);
      blocks_before = blocks;
    } else {
      ++before;
    }
    wanted.push_back(before);
  }
  return wanted;
}

Lists lists_of(const std::vector<trie::Entry>& entries, int64_t num_ranks, int64_t num_chunks) {
  Lists lists{order_of(entries), num_chunks, {}, {}, {}};
  lists.forwards = items_of(lists.order.forwards.size(), num_ranks, num_chunks, false);
  lists.backwards = items_of(lists.order.backwards.size(), num_ranks, num_chunks, true);
  lists.wanted = wanted_forwards(lists);
  return lists;
}

// `ahead`: forwards of a rank before those that the last rank wants.
PipelineSteps steps_of(const Lists& lists, int64_t ahead, bool has_losses) {
  const Order& order = lists.order;
  PipelineSteps steps;
  size_t next = 0;
  size_t next_loss = 0;
  const auto run_forwards = [&](int64_t until) {
    for (; static_cast<int64_t>(next) < until && next < lists.forwards.size(); ++next) {
      const Item& item = lists.forwards[next];
      steps.push_back({Action::kForward, order.forwards[item.place], item.chunk});
      if (!has_losses || !lists.is_last_chunk(item)) continue;
      while (next_loss < order.losses.size() && order.losses[next_loss].first <= item.place + 1) {
        steps.push_back({Action::kLoss, order.losses[next_loss++].second, item.chunk});
      }
    }
  };
  for (size_t i = 0; i < lists.backwards.size(); ++i) {
    const Item& item = lists.backwards[i];
    run_forwards(lists.wanted[i] + ahead);
    const std::optional<int32_t> again = order.recomputes[item.place];
    if (again) steps.push_back({Action::kRecompute, *again, item.chunk});
    steps.push_back({Action::kBackward, order.backwards[item.place], item.chunk});
  }
  run_forwards(static_cast<int64_t>(lists.forwards.size()));
  return steps;
}

}  // namespace

bool completes(const std::vector<PipelineSteps>& ranks, int64_t num_chunks) {
  const auto num_ranks = static_cast<int64_t>(ranks.size());
  const int64_t last = num_ranks * num_chunks - 1;
  // By link: passes that are done, idle ones among them. The n-th of a link is the n-th of all.
  std::vector<int64_t> forwards(last + 1, 0), backwards(last + 1, 0);
  std::set<std::pair<int64_t, int32_t>> forward;  // (link, round)
  std::vector<size_t> next(ranks.size(), 0);
  const auto can_run = [&](int64_t rank, const PipelineStep& step) {
    const int64_t link = step.chunk * num_ranks + rank;
    if (step.action == Action::kForward) {
      return link == 0 || forwards[link - 1] > forwards[link];
    }
    const bool is_there = step.round == kIdle || forward.count({link, step.round}) > 0;
    if (step.action != Action::kBackward) return is_there;
    return is_there && (link == last || backwards[link + 1] > backwards[link]);
  };
  bool moved = true;
  while (moved) {
    moved = false;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const PipelineSteps& steps = ranks[rank];
      while (next[rank] < steps.size() && can_run(rank, steps[next[rank]])) {
        const PipelineStep& step = steps[next[rank]++];
        const int64_t link = step.chunk * num_ranks + rank;
        if (step.action == Action::kForward) {
          ++forwards[link];
          forward.insert({link, step.round});
        }
        if (step.action == Action::kBackward) ++backwards[link];
        moved = true;
      }
    }
  }
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    if (next[rank] < ranks[rank].size()) return false;
  }
  return true;
}

std::vector<PipelineSteps> pipeline_schedule(const std::vector<trie::Entry>& entries,
                                             int64_t num_ranks,
                                             int64_t num_chunks) {
  std::vector<PipelineSteps> ranks(num_ranks);
  if (num_ranks == 1 && num_chunks == 1) {
    for (const trie::Entry& entry : entries) ranks[0].push_back({entry.action, entry.block, 0});
    return ranks;
  }
  const Lists lists = lists_of(entries, num_ranks, num_chunks);
  const int64_t per_rank = num_chunks > 1 ? 2 : 1;
  const auto all = static_cast<int64_t>(lists.forwards.size());
  for (int64_t more = 0;; more = std::min(all, std::max<int64_t>(1, 2 * more))) {
    for (int64_t r = 0; r < num_ranks; ++r) {
      const int64_t ahead = per_rank * (num_ranks - 1 - r) + more;
      ranks[r] = steps_of(lists, ahead, /*has_losses=*/r == num_ranks - 1);
    }
    if (completes(ranks, num_chunks)) return ranks;
    BANYAN_ASSERT(more < all, "no order of the passes of a pipeline goes through");
  }
}

const std::vector<PipelineSteps>& PipelineSchedules::of(const std::vector<trie::Entry>& entries,
                                                        int64_t num_ranks,
                                                        int64_t num_chunks) {
  constexpr size_t kMost = 8;
  const auto found = std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
    return known.num_ranks == num_ranks && known.num_chunks == num_chunks &&
           known.entries == entries;
  });
  if (found != known_.end()) return found->lists;
  if (known_.size() == kMost) known_.pop_back();
  known_.push_front(
      {entries, num_ranks, num_chunks, pipeline_schedule(entries, num_ranks, num_chunks)});
  return known_.front().lists;
}

}  // namespace banyan::parallel
