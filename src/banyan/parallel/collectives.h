// Collective operations over one group of ranks. They block until the result is there.
//
// Sums are carried out here and not by the backend: piece r of the tensor goes to rank r, which
// adds the pieces of all ranks in ascending rank order, in fp32 (fp64 for fp64), and hands the sum
// out. So a sum has the same bits on every backend, for every cut of the tensor and in every run,
// and bf16 is not added in bf16, as Gloo would. The traffic is that of a ring: 2 N (n - 1) / n.
//
// A group of one is the identity: it moves and allocates nothing. A failure throws RankError, whose
// text names operation, group, shape, this rank and the others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "banyan/parallel/transport.h"

namespace banyan::parallel {

// A rank is gone or late (Python: RuntimeError).
class RankError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What one operation of a group has sent from this rank.
struct Traffic {
  int64_t calls = 0;
  int64_t bytes = 0;
};

class Collectives {
 public:
  // This process alone.
  Collectives() = default;
  // `ranks` are the group's ranks in the world, `rank` is this process's place among them.
  Collectives(std::string name,
              std::vector<int64_t> ranks,
              int64_t rank,
              std::shared_ptr<Transport> transport);

  int64_t rank() const { return rank_; }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  bool is_alone() const { return ranks_.size() == 1; }
  bool is_first() const { return rank_ == 0; }
  const std::string& name() const { return name_; }

  // tensor <- sum over all ranks, in place. Any shape; contiguous; floating point.
  void all_reduce_sum(at::Tensor& tensor);
  // The sum's own piece [N / n] of `in` [N], N a multiple of the number of ranks, in fp32 or fp64.
  at::Tensor reduce_scatter_sum(const at::Tensor& in);
  // [n, ...] from [...]: equal shapes on all ranks.
  at::Tensor all_gather(const at::Tensor& in);
  // Pieces of rows, cut as `in_sizes` says; the rows from rank r number out_sizes[r].
  at::Tensor all_to_all(const at::Tensor& in,
                        const std::vector<int64_t>& out_sizes,
                        const std::vector<int64_t>& in_sizes);
  void broadcast(at::Tensor& tensor, int64_t root);
  void send(const at::Tensor& tensor, int64_t to, int64_t tag = 0);
  void receive(at::Tensor& tensor, int64_t from, int64_t tag = 0);
  // A send that does not wait for the receiver. Call what comes back, once: it returns when the
  // tensor, which must not change before, is free again.
  std::function<void()> start_send(const at::Tensor& tensor, int64_t to, int64_t tag);

  // Small things, from the CPU. One entry per rank, in their order.
  std::vector<std::string> all_gather_bytes(const std::string& bytes);
  std::vector<double> all_gather_number(double value);
  std::string broadcast_bytes(const std::string& bytes, int64_t root);
  // True on all ranks if it is on one.
  bool any(bool value);

  // Since the start, by operation: "all_gather", "all_to_all", ...
  const std::map<std::string, Traffic>& traffic() const { return traffic_; }

 private:
  template <typename Call>
  void run(const char* op, const at::Tensor& tensor, int64_t bytes, const Call& call);
  template <typename Call>
  void named(const char* op, const at::Tensor& tensor, const Call& call) const;

  std::string name_ = "alone";
  std::vector<int64_t> ranks_ = {0};
  int64_t rank_ = 0;
  std::shared_ptr<Transport> transport_;
  std::map<std::string, Traffic> traffic_;
};

// True where there is nobody to talk to; null is one process.
inline bool is_alone(const Collectives* ranks) { return ranks == nullptr || ranks->is_alone(); }

}  // namespace banyan::parallel
