// For the tests of this folder: an engine with a paper model. A page holds, per position, what its
// keys and values would depend on: all tokens up to there, the salt, and the weights' epoch. A pass
// may read only what belongs to its own sequence, and the books of pool and tree must balance after
// every pass. Tokens: paper_model.h.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "banyan/rollout/request.h"
#include "banyan/rollout/schedule/paper_model.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {

class PaperEngine {
 public:
  PaperEngine(const SchedulerOptions& options, int32_t num_pages)
      : options_(with_clock(options)), scheduler_(options_), host_(options.host_pages) {
    set_num_pages(num_pages);
  }

  Scheduler& scheduler() { return scheduler_; }
  const Group& group(int32_t id) const { return scheduler_.group(id); }
  const std::vector<int32_t>& response(int32_t id, int32_t child = 0) const {
    return scheduler_.group(id).sequences[child].response;
  }
  double& time() { return time_; }

  std::vector<int32_t> set_num_pages(int32_t num_pages) {
    written_.assign(num_pages, std::vector<Cell>(kPageTokens));
    return scheduler_.set_num_pages(num_pages);
  }

  void set_host_pages(int32_t num_pages) {
    scheduler_.set_host_pages(num_pages);
    host_.assign(num_pages, {});
  }

  // `row` is part of the noise: give equal rows to get equal responses.
  int32_t add(GroupRequest request, int64_t row = -1) {
    const int32_t id = scheduler_.add(std::move(request));
    rows_[id] = row < 0 ? 1000 + num_added_ : row;
    ++num_added_;
    return id;
  }
  int32_t add(std::vector<int32_t> prompt, int32_t n, int32_t max_new) {
    return add(GroupRequest{.prompt = std::move(prompt), .n = n, .max_new = max_new});
  }

  // One pass; false if there was none.
  bool step() {
    if (!scheduler_.next_pass(pass)) {
      check_books();
      return false;
    }
    ++num_passes;
    num_prompt_tokens += pass.num_prompt_tokens;
    carry_out(pass);
    check(pass);
    check_books();
    if (before_draws) before_draws();
    for (const DrawRow& draw : pass.decodes) take(draw.group, draw.child);
    for (const DrawRow& draw : pass.trunks) {
      for (int32_t child = 0; child < group(draw.group).size(); ++child) take(draw.group, child);
    }
    for (const PromptRows& rows : pass.prompt_rows) score(rows);
    return true;
  }

  // The forward fails after some of the copies.
  void fail_pass(size_t num_copies) {
    if (!scheduler_.next_pass(pass)) return;
    pass.copies.resize(std::min(num_copies, pass.copies.size()));
    carry_out(pass);
    scheduler_.withdraw_pass();
    check_books();
  }

  void run() {
    while (step()) {
      ASSERT_LT(num_passes, 200000) << "no end in sight";
      if (testing::Test::HasFatalFailure()) return;
    }
    EXPECT_TRUE(scheduler_.idle());
    EXPECT_EQ(scheduler_.num_used_pages(), 0) << "pages leaked";
    EXPECT_EQ(scheduler_.host().num_free(), scheduler_.host().num_pages()) << "slots leaked";
    EXPECT_EQ(scheduler_.num_running(), 0);
    EXPECT_EQ(scheduler_.num_groups_started(), 0);
  }

  // Every response that ended by itself is the plain one, every other the beginning of it.
  void check_responses(int32_t id) const {
    const Group& g = group(id);
    for (int32_t child = 0; child < g.size(); ++child) {
      const std::vector<int32_t> plain =
          plain_response(g.prompt(), g.request.max_new, ignores_stop(g), rows_.at(id), child);
      const std::vector<int32_t>& got = g.sequences[child].response;
      ASSERT_LE(got.size(), plain.size());
      EXPECT_TRUE(std::equal(got.begin(), got.end(), plain.begin())) << "group " << id;
      if (!aborted_.contains({id, child})) {
        EXPECT_EQ(got.size(), plain.size()) << "group " << id << " child " << child;
      }
    }
  }

  void abort(int32_t id, int32_t child) {
    if (group(id).sequences[child].state != SequenceState::kFinished) {
      aborted_.insert({id, child});
    }
    scheduler_.finish(id, child, Ended::kAborted);
    check_books();
  }

  void drop(int32_t id) {
    for (int32_t child = 0; child < group(id).size(); ++child) {
      if (group(id).sequences[child].state != SequenceState::kFinished) {
        aborted_.insert({id, child});
      }
    }
    scheduler_.drop(id);
    check_books();
  }

  // Every page has exactly the holders that can be named.
  void check_books() const {
    const PagePool& pool = scheduler_.pool();
    const PrefixTree& tree = scheduler_.tree();
    std::vector<int32_t> holders(pool.num_pages(), 0);
    int32_t slots = 0;
    int32_t running = 0;
    const auto hold_node = [&](int32_t index) {
      ASSERT_GE(tree.node(index).page, 0) << "a held node has no page";
      ++holders[tree.node(index).page];
    };
    for (int32_t i = 0; i < tree.num_indices(); ++i) {
      const PrefixTree::Node& node = tree.node(i);
      if (node.page < 0) continue;
      ++holders[node.page];
      const bool top = tree.node(node.parent).parent < 0;
      EXPECT_TRUE(top || tree.node(node.parent).page >= 0) << "a suffix outlived its prefix";
    }
    for (int32_t id = 0; id < num_ids(); ++id) {
      if (!rows_.contains(id)) continue;
      const Group& g = group(id);
      for (int32_t i = 0; i < g.num_held; ++i) {
        hold_node(g.path[i]);
        EXPECT_EQ(g.table[i], tree.node(g.path[i]).page);
      }
      for (const Sequence& s : g.sequences) {
        running += s.state == SequenceState::kRunning;
        slots += static_cast<int32_t>(s.host.size());
        if (s.state != SequenceState::kRunning) {
          EXPECT_TRUE(s.table.empty() && s.path.empty());
          continue;
        }
        for (const int32_t node : s.path) hold_node(node);
        for (size_t i = g.num_trunk_pages() + s.path.size(); i < s.table.size(); ++i) {
          ++holders[s.table[i]];
        }
      }
    }
    int32_t cached = 0;
    int32_t free = 0;
    for (int32_t page = 0; page < pool.num_pages(); ++page) {
      ASSERT_EQ(pool.holders(page), holders[page]) << "page " << page;
      free += holders[page] == 0;
    }
    for (int32_t i = 0; i < tree.num_indices(); ++i) {
      const PrefixTree::Node& node = tree.node(i);
      if (node.page < 0 || holders[node.page] > 1) continue;
      ++cached;
      EXPECT_EQ(node.generation, tree.generation()) << "an old page without holders was kept";
    }
    EXPECT_EQ(pool.num_free(), free);
    EXPECT_EQ(tree.num_cached(), cached);
    EXPECT_EQ(scheduler_.host().num_pages() - scheduler_.host().num_free(), slots);
    EXPECT_EQ(scheduler_.num_running(), running);
    EXPECT_LE(running, options_.max_num_seqs);
  }

  void forget(int32_t id) {
    scheduler_.forget(id);
    rows_.erase(id);
    std::erase_if(aborted_, [&](const auto& entry) { return entry.first == id; });
  }

  bool never_stops = false;  // responses go on to the end, and the scheduler does not expect it
  std::function<void()> before_draws;
  Pass pass;
  int64_t num_passes = 0;
  int64_t num_prompt_tokens = 0;
  int64_t num_copies = 0;
  int64_t max_running = 0;
  std::vector<std::pair<int32_t, int32_t>> ended;  // group, child, in order
  std::map<int32_t, std::set<int32_t>> scored;     // positions of prompts

 private:
  // What the keys and values of a position depend on.
  struct Cell {
    uint64_t context = 0;
    int64_t epoch = -1;
  };

  SchedulerOptions with_clock(SchedulerOptions options) {
    options.now = [this] { return time_; };
    return options;
  }
  bool ignores_stop(const Group& g) const { return never_stops || g.request.ignore_eos; }
  int32_t num_ids() const { return rows_.empty() ? 0 : rows_.rbegin()->first + 1; }

  std::vector<uint64_t> contexts(const Run& run) const {
    const Group& g = group(run.group);
    uint64_t hash = std::hash<std::string>()(g.request.salt) + 17;
    std::vector<uint64_t> out;
    const int32_t known = run.child == kTrunk ? g.prompt_length() : g.known(g.sequences[run.child]);
    for (int32_t position = 0; position < known; ++position) {
      const int32_t token =
          run.child == kTrunk ? g.prompt()[position] : g.token_at(g.sequences[run.child], position);
      hash = hash * 6364136223846793005ull + static_cast<uint64_t>(token) + 1442695040888963407ull;
      out.push_back(hash);
    }
    return out;
  }

  void carry_out(const Pass& pass) {
    for (const PageCopy& copy : pass.copies) {
      switch (copy.kind) {
        case PageCopy::Kind::kCopy:
          ASSERT_NE(copy.from, copy.to);
          written_.at(copy.to) = written_.at(copy.from);
          break;
        case PageCopy::Kind::kSpill:
          host_.at(copy.to) = written_.at(copy.from);
          break;
        case PageCopy::Kind::kRestore:
          written_.at(copy.to) = host_.at(copy.from);
          break;
      }
    }
    num_copies += static_cast<int64_t>(pass.copies.size());
  }

  // Writes first, as paged attention does, then looks at what every run reads.
  void check(const Pass& pass) {
    ASSERT_LE(pass.num_tokens, options_.max_num_batched_tokens);
    std::map<int32_t, size_t> writer;
    int32_t total = 0;
    int64_t children = 0;
    for (size_t r = 0; r < pass.runs.size(); ++r) {
      const Run& run = pass.runs[r];
      const std::span<const int32_t> pages = scheduler_.pages_of(run);
      const std::vector<uint64_t> context = contexts(run);
      ASSERT_GE(run.num_tokens, 1);
      ASSERT_LE(run.first_position + run.num_tokens, static_cast<int32_t>(context.size()));
      if (static_cast<int32_t>(r) < pass.num_decode_runs) {
        ASSERT_TRUE(run.num_tokens == 1 && run.child != kTrunk);
      }
      for (int32_t i = 0; i < run.num_tokens; ++i) {
        const int32_t position = run.first_position + i;
        const int32_t page = pages[position / kPageTokens];
        Cell& cell = written_[page][position % kPageTokens];
        const Cell before = cell;
        cell = {.context = context[position], .epoch = scheduler_.epoch()};
        // A page that others read is written only by its trunk's producer, or again with what
        // stands there.
        const bool same = before.context == cell.context && before.epoch == cell.epoch;
        if (run.child != kTrunk) {
          ASSERT_EQ(scheduler_.pool().holders(page), 1) << "wrote to a page that others read";
        }
        const auto [it, fresh] = writer.emplace(page, r);
        ASSERT_TRUE(fresh || it->second == r || same) << "two runs write one page";
      }
      total += run.num_tokens;
      children += run.child != kTrunk;
      // Reads of what runs before it in the pass wrote, or passes before.
      const bool tainted = group(run.group).tainted;
      for (int32_t position = 0; position < run.first_position + run.num_tokens; ++position) {
        const Cell& cell = written_[pages[position / kPageTokens]][position % kPageTokens];
        ASSERT_EQ(cell.context, context[position])
            << "group " << run.group << " child " << run.child << " position " << position;
        if (!tainted) {
          ASSERT_EQ(cell.epoch, scheduler_.epoch()) << "stale keys and values";
        }
      }
    }
    ASSERT_EQ(total, pass.num_tokens);
    max_running = std::max(max_running, children);
    check_order(pass);
  }

  void check_order(const Pass& pass) {
    std::set<int32_t> seen;
    for (int32_t r = 0; r < pass.num_decode_runs; ++r) {
      const Run& run = pass.runs[r];
      if (r > 0 && pass.runs[r - 1].group == run.group) {
        ASSERT_LT(pass.runs[r - 1].child, run.child);
      } else {
        ASSERT_TRUE(seen.insert(run.group).second) << "siblings are apart";
      }
    }
    const auto rows_ascend = [](const std::vector<DrawRow>& rows) {
      return std::is_sorted(rows.begin(), rows.end(), [](const DrawRow& a, const DrawRow& b) {
        return a.row < b.row;
      });
    };
    ASSERT_TRUE(rows_ascend(pass.decodes) && rows_ascend(pass.trunks));
    // Rows drawn from are the last known position of whom they are drawn for.
    std::vector<std::pair<const Run*, int32_t>> tokens;
    for (const Run& run : pass.runs) {
      for (int32_t i = 0; i < run.num_tokens; ++i)
        tokens.emplace_back(&run, run.first_position + i);
    }
    for (const DrawRow& draw : pass.decodes) {
      const auto& [run, position] = tokens.at(draw.row);
      ASSERT_TRUE(run->group == draw.group && run->child == draw.child);
      ASSERT_EQ(position + 1, group(draw.group).known(group(draw.group).sequences[draw.child]));
    }
    for (const DrawRow& draw : pass.trunks) {
      const auto& [run, position] = tokens.at(draw.row);
      ASSERT_TRUE(run->child == kTrunk && draw.child == kTrunk);
      ASSERT_EQ(position + 1, group(draw.group).prompt_length());
      const std::vector<uint64_t> own = contexts({.group = draw.group, .child = kTrunk});
      ASSERT_EQ(own.back(), contexts(*run)[position]) << "drawn from another prompt's row";
    }
  }

  void take(int32_t id, int32_t child) {
    const Group& g = group(id);
    const Sequence& sequence = g.sequences[child];
    if (sequence.state == SequenceState::kFinished) return;
    std::vector<int32_t> tokens = g.prompt();
    tokens.insert(tokens.end(), sequence.response.begin(), sequence.response.end());
    const int32_t token = next_token(tokens, rows_.at(id), child);
    scheduler_.append(id, child, token);
    const bool stops = token == kPaperStop && !ignores_stop(g);
    if (stops || static_cast<int32_t>(sequence.response.size()) == g.request.max_new) {
      ended.emplace_back(id, child);
      scheduler_.finish(id, child, Ended::kByItself);
    }
  }

  void score(const PromptRows& rows) {
    for (int32_t i = 0; i < rows.num_tokens; ++i) {
      scored[rows.group].insert(rows.first_position + i);
    }
    const Group& g = group(rows.group);
    if (g.request.max_new > 0 || rows.first_position + rows.num_tokens < g.prompt_length()) return;
    for (int32_t child = 0; child < g.size(); ++child) {
      scheduler_.finish(rows.group, child, Ended::kByItself);
    }
  }

  double time_ = 0.0;
  SchedulerOptions options_;
  Scheduler scheduler_;
  std::vector<std::vector<Cell>> written_;
  std::vector<std::vector<Cell>> host_;
  std::map<int32_t, int64_t> rows_;  // by group id
  int64_t num_added_ = 0;
  std::set<std::pair<int32_t, int32_t>> aborted_;
};

}  // namespace banyan::rollout
