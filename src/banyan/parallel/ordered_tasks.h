// Runs tasks one after the other in the order in which they were given: at once, or on a thread of
// its own, so that what ranks do together stays in one order while this rank computes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace banyan::parallel {

class OrderedTasks {
 public:
  explicit OrderedTasks(bool threaded);
  ~OrderedTasks();  // waits for the task in progress; those behind it are not run
  OrderedTasks(const OrderedTasks&) = delete;
  OrderedTasks& operator=(const OrderedTasks&) = delete;

  // The task's number, from 1.
  int64_t add(std::function<void()> task);
  // Until task `number` is done. Rethrows the first error of any task so far; after one no task
  // runs any more.
  void wait(int64_t number);
  void drain() { wait(added_); }

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  int64_t added_ = 0;  // by the one thread that adds
  int64_t done_ = 0;
  bool ends_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace banyan::parallel
