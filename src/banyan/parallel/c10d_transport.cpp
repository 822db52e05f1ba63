#include "banyan/parallel/c10d_transport.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "banyan/core/error.h"

// alltoall_base and _allgather_base are the names that every release since 2.9 has.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace banyan::parallel {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

class C10dTransport final : public Transport {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, std::chrono::milliseconds deadline)
      : group_(std::move(group)), deadline_(deadline) {}

  void all_to_all(at::Tensor& out,
                  at::Tensor& in,
                  std::vector<int64_t> out_sizes,
                  std::vector<int64_t> in_sizes) override {
    c10d::AllToAllOptions options;
    options.timeout = deadline_;
    at::Tensor own_out = own(out);
    at::Tensor own_in = own(in);
    wait(group_->alltoall_base(own_out, own_in, out_sizes, in_sizes, options));
  }

  void all_gather(at::Tensor& out, at::Tensor& in) override {
    c10d::AllgatherOptions options;
    options.timeout = deadline_;
    at::Tensor own_out = own(out);
    at::Tensor own_in = own(in);
    wait(group_->_allgather_base(own_out, own_in, options));
  }

  void broadcast(at::Tensor& tensor, int64_t root) override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = deadline_;
    std::vector<at::Tensor> tensors = {own(tensor)};
    wait(group_->broadcast(tensors, options));
  }

  void send(at::Tensor& tensor, int64_t to, int64_t tag) override {
    std::vector<at::Tensor> tensors = {own(tensor)};
    wait(group_->send(tensors, static_cast<int>(to), static_cast<int>(tag)));
  }

  std::function<void()> start_send(at::Tensor& tensor, int64_t to, int64_t tag) override {
    std::vector<at::Tensor> tensors = {own(tensor)};
    Work work = group_->send(tensors, static_cast<int>(to), static_cast<int>(tag));
    return [this, work] { wait(work); };
  }

  void receive(at::Tensor& tensor, int64_t from, int64_t tag) override {
    std::vector<at::Tensor> tensors = {own(tensor)};
    wait(group_->recv(tensors, static_cast<int>(from), static_cast<int>(tag)));
  }

 private:
  // The group's threads may hold a tensor for a while after the call: one that Python knows would
  // want the interpreter when they let go of it, which may have ended by then.
  static at::Tensor own(const at::Tensor& tensor) { return tensor.detach(); }
  void wait(const Work& work) { work->wait(deadline_); }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::chrono::milliseconds deadline_;
};

}  // namespace

std::shared_ptr<Transport> c10d_transport(const std::string& group_name,
                                          std::chrono::milliseconds deadline) {
  c10::intrusive_ptr<c10d::ProcessGroup> group = c10d::resolve_process_group(group_name);
  BANYAN_ASSERT(group != nullptr, "no process group named '", group_name, "'");
  return std::make_shared<C10dTransport>(std::move(group), deadline);
}

}  // namespace banyan::parallel
