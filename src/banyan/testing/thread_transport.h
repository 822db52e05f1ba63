// Ranks as threads of one process, for tests of what runs over several ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "banyan/parallel/groups.h"

namespace banyan::testing {

// Tensors lie on a table; each rank puts its own there, all wait, each takes what it needs.
class ThreadTable {
 public:
  explicit ThreadTable(int64_t size) : tensors_(size), size_(size) {}

  // The tensors of all ranks; throws once a rank has left for good.
  std::vector<at::Tensor> exchange(int64_t rank, const at::Tensor& mine) {
    {
      const std::lock_guard lock(mutex_);
      tensors_[rank] = mine.clone();
    }
    meet();
    std::vector<at::Tensor> all;
    {
      const std::lock_guard lock(mutex_);
      all = tensors_;
    }
    meet();
    return all;
  }

  void put(int64_t from, int64_t to, int64_t tag, const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    mail_[{from, to, tag}].push_back(tensor.clone());
    changed_.notify_all();
  }

  at::Tensor take(int64_t from, int64_t to, int64_t tag) {
    std::unique_lock lock(mutex_);
    std::deque<at::Tensor>& box = mail_[{from, to, tag}];
    changed_.wait(lock, [&] { return !box.empty() || left_; });
    if (box.empty()) throw std::runtime_error("the other rank has left");
    at::Tensor tensor = box.front();
    box.pop_front();
    return tensor;
  }

  // Whoever waits is woken with an error.
  void leave() {
    const std::lock_guard lock(mutex_);
    left_ = true;
    changed_.notify_all();
  }

 private:
  void meet() {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return round_ != round || left_; });
    if (round_ == round) throw std::runtime_error("another rank has left");
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<at::Tensor> tensors_;
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::deque<at::Tensor>> mail_;
  int64_t size_;
  int64_t arrived_ = 0;
  int64_t round_ = 0;
  bool left_ = false;
};

class ThreadTransport final : public parallel::Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadTable> table, int64_t rank)
      : table_(std::move(table)), rank_(rank) {}

  void all_to_all(at::Tensor& out,
                  at::Tensor& in,
                  std::vector<int64_t> out_sizes,
                  std::vector<int64_t> in_sizes) override {
    // Each rank's own cut travels with its rows, so that ranks that disagree are found out.
    const std::vector<at::Tensor> all = table_->exchange(rank_, in);
    at::Tensor sizes = at::Tensor(in).new_empty({static_cast<int64_t>(in_sizes.size())},
                                                at::TensorOptions(at::kLong));
    std::copy(in_sizes.begin(), in_sizes.end(), sizes.mutable_data_ptr<int64_t>());
    const std::vector<at::Tensor> cuts = table_->exchange(rank_, sizes);
    int64_t at = 0;
    for (size_t r = 0; r < all.size(); ++r) {
      const int64_t* cut = cuts[r].const_data_ptr<int64_t>();
      if (cut[rank_] != out_sizes[r]) throw std::runtime_error("sizes do not fit");
      const int64_t begin = std::accumulate(cut, cut + rank_, int64_t{0});
      out.narrow(0, at, cut[rank_]).copy_(all[r].narrow(0, begin, cut[rank_]));
      at += cut[rank_];
    }
  }

  void all_gather(at::Tensor& out, at::Tensor& in) override {
    const std::vector<at::Tensor> all = table_->exchange(rank_, in);
    for (size_t r = 0; r < all.size(); ++r) {
      if (all[r].numel() != in.numel()) throw std::runtime_error("sizes do not fit");
      out.narrow(0, static_cast<int64_t>(r) * in.numel(), in.numel()).copy_(all[r]);
    }
  }

  void broadcast(at::Tensor& tensor, int64_t root) override {
    tensor.copy_(table_->exchange(rank_, tensor)[root]);
  }

  void send(at::Tensor& tensor, int64_t to, int64_t tag) override {
    table_->put(rank_, to, tag, tensor);
  }

  void receive(at::Tensor& tensor, int64_t from, int64_t tag) override {
    tensor.copy_(table_->take(from, rank_, tag));
  }

 private:
  std::shared_ptr<ThreadTable> table_;
  int64_t rank_;
};

// Runs `body` once per rank, on threads of their own. `leave` wakes whoever waits for a rank that
// threw; the first error by rank is thrown again.
inline void run_threads(int64_t size,
                        const std::function<void(int64_t rank)>& body,
                        const std::function<void()>& leave) {
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
        leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Ranks of one group, "dp".
inline void run_ranks(int64_t size, const std::function<void(parallel::Collectives&)>& body) {
  const auto table = std::make_shared<ThreadTable>(size);
  std::vector<int64_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  run_threads(
      size,
      [&](int64_t rank) {
        parallel::Collectives group(
            "dp", ranks, rank, std::make_shared<ThreadTransport>(table, rank));
        body(group);
      },
      [&] { table->leave(); });
}

// Ranks in the groups of a mesh.
inline void run_mesh(int64_t size,
                     const parallel::MeshShape& shape,
                     const std::function<void(parallel::Groups&)>& body) {
  const parallel::Mesh mesh(size, shape);
  std::vector<std::shared_ptr<ThreadTable>> tables;
  for (const parallel::MeshGroup& group : mesh.groups()) {
    tables.push_back(std::make_shared<ThreadTable>(static_cast<int64_t>(group.ranks.size())));
  }
  run_threads(
      size,
      [&](int64_t rank) {
        parallel::Groups groups = parallel::make_groups(mesh, rank, [&](int64_t index) {
          const std::vector<int64_t>& members = mesh.groups()[index].ranks;
          const int64_t place = std::find(members.begin(), members.end(), rank) - members.begin();
          return std::make_shared<ThreadTransport>(tables[index], place);
        });
        body(groups);
      },
      [&] {
        for (const auto& table : tables) table->leave();
      });
}

}  // namespace banyan::testing
