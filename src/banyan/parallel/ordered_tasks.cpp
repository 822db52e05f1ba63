#include "banyan/parallel/ordered_tasks.h"

#include <utility>

namespace banyan::parallel {

OrderedTasks::OrderedTasks(bool threaded) {
  if (threaded) thread_ = std::thread([this] { work(); });
}

OrderedTasks::~OrderedTasks() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

int64_t OrderedTasks::add(std::function<void()> task) {
  ++added_;
  if (!thread_.joinable()) {
    task();
    done_ = added_;
    return added_;
  }
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(task));
  changed_.notify_all();
  return added_;
}

void OrderedTasks::wait(int64_t number) {
  if (!thread_.joinable()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number || error_; });
  if (error_) std::rethrow_exception(error_);
}

void OrderedTasks::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ends_ || !waiting_.empty(); });
    if (ends_) return;
    std::function<void()> task = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = nullptr;
    lock.lock();
    ++done_;
    error_ = error;
    changed_.notify_all();
    if (error_) return;
  }
}

}  // namespace banyan::parallel
