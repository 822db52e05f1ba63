#include "banyan/train/weight_push.h"

#include <ATen/ops/empty.h>

#include <string>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/train/wire.h"

namespace banyan::train {
namespace {

constexpr int64_t kMessage = 4 << 20;  // numbers

class Sender {
 public:
  explicit Sender(parallel::Collectives& to) : to_(to) {}

  void add(const std::string& name, const at::Tensor& whole) {
    const int64_t count = whole.numel();
    if (filled_ + count > kMessage) flush();
    names_.push_back(name);
    if (count > kMessage) return send(whole.contiguous().view({-1}));
    if (!message_.defined()) message_ = at::empty({kMessage}, whole.options());
    message_.narrow(0, filled_, count).copy_(whole.reshape({-1}));
    filled_ += count;
  }

  void end() {
    flush();
    tell_names();  // none: that was all
  }

 private:
  void flush() {
    if (filled_ > 0) send(message_.narrow(0, 0, filled_));
    filled_ = 0;
  }
  void send(at::Tensor numbers) {
    tell_names();
    to_.broadcast(numbers, 0);
  }
  void tell_names() {
    WireWriter out;
    out.put(names_);
    to_.broadcast_bytes(out.bytes(), 0);
    names_.clear();
  }

  parallel::Collectives& to_;
  at::Tensor message_;
  int64_t filled_ = 0;
  std::vector<std::string> names_;  // of what the next message holds
};

}  // namespace

void send_weights(models::CausalLM& actor, parallel::Fsdp* fsdp, parallel::Groups& groups) {
  Sender sender(groups.hand_over);
  const bool sends = !groups.hand_over.is_alone();
  const auto visit = [&](const std::string& name, const at::Tensor& whole) {
    if (sends) sender.add(name, whole);
  };
  if (fsdp != nullptr) {
    fsdp->each(at::kFloat,
               [&](const Param& param, const at::Tensor& whole) { visit(param.name, whole); });
  } else {
    parallel::WeightView(actor.params(), groups).each(visit);
  }
  if (sends) sender.end();
}

void take_weights(models::CausalLM& model, parallel::Collectives& hand_over) {
  while (true) {
    const std::string bytes = hand_over.broadcast_bytes("", 0);
    const auto names = WireReader(bytes).next<std::vector<std::string>>();
    if (names.empty()) break;
    int64_t count = 0;
    for (const std::string& name : names) count += model.params().at(name).master.numel();
    at::Tensor numbers = at::empty({count}, model.params().at(names[0]).master.options());
    hand_over.broadcast(numbers, 0);
    int64_t begin = 0;
    for (const std::string& name : names) {
      const at::Tensor& master = model.params().at(name).master;
      master.copy_(numbers.narrow(0, begin, master.numel()).view(master.sizes()));
      begin += master.numel();
    }
  }
  model.params().repack();
}

}  // namespace banyan::train
