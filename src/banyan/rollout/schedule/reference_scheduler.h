// A plain scheduler, written apart from the real one to compare with (in the manner of nano-vllm).
// Every response is a request of its own that computes its own prompt. No tree, no groups, no
// reservation, no chunks ordered by anything but arrival: what runs gets its pages, the last one is
// preempted where there are none, the next in line starts if its tokens fit, and all that is known
// and not computed is computed up to the budget.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "banyan/rollout/schedule/paper_engine.h"

namespace banyan::rollout {

class ReferenceScheduler {
 public:
  ReferenceScheduler(int32_t max_num_seqs, int32_t budget, int32_t num_pages)
      : max_num_seqs_(max_num_seqs), budget_(budget), free_pages_(num_pages) {}

  void add(int32_t group, const std::vector<int32_t>& prompt, int32_t n, int32_t max_new) {
    for (int32_t child = 0; child < n; ++child) {
      waiting_.push_back({.group = group,
                          .child = child,
                          .tokens = prompt,
                          .prompt = static_cast<int32_t>(prompt.size()),
                          .max_new = max_new});
    }
  }

  void abort(int32_t group, int32_t child) {
    const auto is_it = [&](const Request& r) { return r.group == group && r.child == child; };
    for (const Request& request : running_) {
      if (is_it(request)) end(request);
    }
    for (const Request& request : waiting_) {
      if (is_it(request)) responses[{group, child}] = response(request);
    }
    std::erase_if(running_, is_it);
    std::erase_if(waiting_, is_it);
  }

  // One pass; false if there is nothing to do.
  bool step() {
    if (running_.empty() && waiting_.empty()) return false;
    ++num_passes;
    for (size_t i = 0; i < running_.size(); ++i) {
      while (!take_pages(running_[i])) {
        preempt_last();
        if (i >= running_.size()) break;  // it was the last itself
      }
    }
    while (!waiting_.empty() && static_cast<int32_t>(running_.size()) < max_num_seqs_ &&
           take_pages(waiting_.front())) {
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    int32_t budget = budget_;
    std::vector<size_t> done;
    for (size_t i = 0; i < running_.size(); ++i) {
      Request& request = running_[i];
      const int32_t known = static_cast<int32_t>(request.tokens.size());
      const int32_t count = std::min(known - request.computed, budget);
      budget -= count;
      num_tokens += count;
      request.computed += count;
      if (request.computed < known) continue;
      request.tokens.push_back(next_token(request.tokens, 1000 + request.group, request.child));
      const int32_t length = static_cast<int32_t>(request.tokens.size()) - request.prompt;
      if (request.tokens.back() == kPaperStop || length == request.max_new) done.push_back(i);
    }
    for (auto it = done.rbegin(); it != done.rend(); ++it) {
      end(running_[*it]);
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(*it));
    }
    return true;
  }

  std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> responses;  // group, child
  int64_t num_passes = 0;
  int64_t num_tokens = 0;

 private:
  struct Request {
    int32_t group = 0;
    int32_t child = 0;
    std::vector<int32_t> tokens;
    int32_t prompt = 0;
    int32_t max_new = 0;
    int32_t computed = 0;
    int32_t pages = 0;
  };

  static std::vector<int32_t> response(const Request& request) {
    return {request.tokens.begin() + request.prompt, request.tokens.end()};
  }

  bool take_pages(Request& request) {
    const int32_t wanted =
        static_cast<int32_t>((request.tokens.size() + kPageTokens - 1) / kPageTokens);
    if (wanted - request.pages > free_pages_) return false;
    free_pages_ -= std::max(0, wanted - request.pages);
    request.pages = std::max(request.pages, wanted);
    return true;
  }

  void preempt_last() {
    Request& last = running_.back();
    free_pages_ += last.pages;
    last.pages = 0;
    last.computed = 0;
    waiting_.push_front(std::move(last));
    running_.pop_back();
  }

  void end(const Request& request) {
    free_pages_ += request.pages;
    responses[{request.group, request.child}] = response(request);
  }

  int32_t max_num_seqs_;
  int32_t budget_;
  int32_t free_pages_;
  std::deque<Request> waiting_;
  std::vector<Request> running_;
};

}  // namespace banyan::rollout
