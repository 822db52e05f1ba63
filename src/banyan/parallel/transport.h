// What carries the bytes of one group of ranks. Two kinds: a process group of torch.distributed
// (c10d_transport.h), and threads of one process (testing/thread_transport.h), so that C++ tests
// run several ranks without sockets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace banyan::parallel {

// All ranks call the same function in the same order with tensors that fit; every tensor is
// contiguous. A call returns when the results are there, and throws what it likes on failure.
class Transport {
 public:
  virtual ~Transport() = default;

  // Piece r of `in` goes to rank r; `out` takes a piece from each rank in their order. Sizes are
  // rows of dimension 0.
  virtual void all_to_all(at::Tensor& out,
                          at::Tensor& in,
                          std::vector<int64_t> out_sizes,
                          std::vector<int64_t> in_sizes) = 0;
  // `out` takes `in` of all ranks in their order.
  virtual void all_gather(at::Tensor& out, at::Tensor& in) = 0;
  virtual void broadcast(at::Tensor& tensor, int64_t root) = 0;
  virtual void send(at::Tensor& tensor, int64_t to, int64_t tag) = 0;
  virtual void receive(at::Tensor& tensor, int64_t from, int64_t tag) = 0;
  // A send that returns at once; what comes back waits until the tensor is free again.
  virtual std::function<void()> start_send(at::Tensor& tensor, int64_t to, int64_t tag) {
    send(tensor, to, tag);
    return [] {};
  }
};

}  // namespace banyan::parallel
