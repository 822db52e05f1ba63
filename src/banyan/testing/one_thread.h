// One thread while it lives: tests of many small operators run faster so.
#pragma once

#include <ATen/Parallel.h>

namespace banyan::testing {

class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace banyan::testing
