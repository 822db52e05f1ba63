#include "banyan/train/weight_push.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <map>
#include <string>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/parallel/weight_view.h"
#include "banyan/train/wire.h"

namespace banyan::train {
namespace {

constexpr int64_t kMessage = 4 << 20;  // numbers

// Tensors of one type that wait for their message.
struct Message {
  bool is_in_master_type = false;
  at::Tensor numbers = {};
  int64_t count = 0;
  std::vector<std::string> names = {};
};

class Sender {
 public:
  Sender(at::ScalarType type, const std::set<std::string>& as_masters, parallel::Collectives& to)
      : type_(type), as_masters_(as_masters), to_(to) {}

  void add(const std::string& name, const at::Tensor& whole) {
    const bool is_master = as_masters_.contains(name);
    Message& message = is_master ? masters_ : forms_;
    const int64_t count = whole.numel();
    if (message.count + count > kMessage) flush(message);
    message.names.push_back(name);
    const at::ScalarType type = is_master ? whole.scalar_type() : type_;
    if (count > kMessage) return send(message, whole.to(type).contiguous().view({-1}));
    if (!message.numbers.defined()) {
      message.numbers = at::empty({kMessage}, whole.options().dtype(type));
    }
    message.numbers.narrow(0, message.count, count).copy_(whole.reshape({-1}));
    message.count += count;
  }

  void end() {
    flush(forms_);
    flush(masters_);
    announce(masters_);  // no names: that was all
  }

 private:
  void flush(Message& message) {
    if (message.count > 0) send(message, message.numbers.narrow(0, 0, message.count));
    message.count = 0;
  }
  void send(Message& message, at::Tensor numbers) {
    announce(message);
    to_.broadcast(numbers, 0);
  }
  void announce(Message& message) {
    WireWriter out;
    out(message.is_in_master_type, message.names);
    to_.broadcast_bytes(out.bytes(), 0);
    message.names.clear();
  }

  at::ScalarType type_;
  const std::set<std::string>& as_masters_;
  parallel::Collectives& to_;
  Message forms_;
  Message masters_ = {.is_in_master_type = true};
};

}  // namespace

std::set<std::string> read_as_masters(models::CausalLM& model) {
  std::set<std::string> names;
  for (const Param& param : model.params().params()) {
    if (param.is_form) names.insert(param.name);
  }
  return names;
}

void send_weights(models::CausalLM& actor,
                  parallel::Fsdp* fsdp,
                  const std::set<std::string>& as_masters,
                  parallel::Groups& groups) {
  Sender sender(actor.options().dtype, as_masters, groups.hand_over);
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

void take_weights(models::CausalLM& model,
                  parallel::Collectives& hand_over,
                  const FilledWeights::Put& put) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (models::TensorShape& tensor : model.tensors()) shapes[tensor.name] = std::move(tensor.shape);
  const at::TensorOptions master = model.params().params().at(0).master.options();
  while (true) {
    const std::string bytes = hand_over.broadcast_bytes("", 0);
    WireReader in(bytes);
    const bool is_in_master_type = in.next<bool>();
    const auto names = in.next<std::vector<std::string>>();
    if (names.empty()) break;
    int64_t count = 0;
    for (const std::string& name : names) count += c10::multiply_integers(shapes.at(name));
    at::Tensor numbers =
        at::empty({count}, is_in_master_type ? master : master.dtype(model.options().dtype));
    hand_over.broadcast(numbers, 0);
    int64_t begin = 0;
    for (const std::string& name : names) {
      const std::vector<int64_t>& shape = shapes.at(name);
      const int64_t size = c10::multiply_integers(shape);
      put(name, numbers.narrow(0, begin, size).view(shape));
      begin += size;
    }
  }
}

}  // namespace banyan::train
