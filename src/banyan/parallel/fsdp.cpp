#include "banyan/parallel/fsdp.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/parallel/pass_order.h"

namespace banyan::parallel {
namespace {

std::vector<at::Tensor> gradients_of(const ParamTable& table, const std::vector<size_t>& params) {
  std::vector<at::Tensor> out;
  for (const size_t i : params) out.push_back(table.params()[i].grad);
  return out;
}

}  // namespace

Fsdp::Fsdp(ParamTable& whole, const FsdpGroups& groups, const FsdpOptions& options, UnitUses uses)
    : whole_(whole),
      groups_(groups),
      options_(options),
      uses_of_(std::move(uses)),
      units_(whole.num_units()),
      tasks_(options.forward_prefetch && !groups.shard->is_alone()) {
  BANYAN_ASSERT(whole.keeper() == nullptr, "the parameters have a keeper already");
  for (int64_t u = 0; u < whole.num_units(); ++u) cut(u);
  if (options.with_gradients) parts_.ensure_grads();
  whole_.set_keeper(this);
}

Fsdp::~Fsdp() { whole_.set_keeper(nullptr); }

void Fsdp::cut(int64_t u) {
  Unit& unit = units_[u];
  unit.weights = std::make_unique<UnitWeights>(whole_, u);
  const int64_t total = unit.weights->num_elements();
  const int64_t size = groups_.shard->size();
  const int64_t begin = (total + size - 1) / size * groups_.shard->rank();
  unit.piece = (total + size - 1) / size;
  const at::TensorOptions like = whole_.params()[unit.weights->params()[0]].master.options();
  at::Tensor own = at::zeros({unit.piece}, like);
  const int64_t count = std::max<int64_t>(0, std::min(unit.piece, total - begin));
  if (count > 0 && !whole_.masters_are_empty()) {
    own.narrow(0, 0, count).copy_(unit.weights->flat_masters().narrow(0, begin, count));
  }
  parts_.add("unit." + std::to_string(u), own);
  const at::ScalarType master_type = own.scalar_type();
  const bool in_master = unit.weights->has_form() || master_type == options_.compute;
  unit.gather_type = in_master ? master_type : options_.compute;
  if (options_.with_gradients) {
    // The tensors are made unit by unit, so that no rank ever holds all gradients.
    whole_.ensure_unit_grads(u);
    unit.gradients = std::make_unique<ComingMemory>(gradients_of(whole_, unit.weights->params()));
    unit.gradients->drop();
  }
  unit.weights->drop();
}

std::vector<OwnedRange> Fsdp::owned(int64_t rank) const {
  std::vector<OwnedRange> out;
  for (size_t u = 0; u < units_.size(); ++u) {
    const int64_t begin = units_[u].piece * rank;
    int64_t at = 0;
    for (const size_t i : units_[u].weights->params()) {
      const int64_t numel = whole_.params()[i].master.numel();
      const int64_t from = std::max(begin, at);
      const int64_t to = std::min(begin + units_[u].piece, at + numel);
      if (from < to) {
        out.push_back({i, from - at, to - from, static_cast<int64_t>(u), from - begin});
      }
      at += numel;
    }
  }
  return out;
}

void Fsdp::put(size_t param, const at::Tensor& values) {
  for (const OwnedRange& own : owned(groups_.shard->rank())) {
    if (own.param != param) continue;
    parts_.params()[own.unit]
        .master.narrow(0, own.at, own.count)
        .copy_(values.contiguous().view({-1}).narrow(0, own.begin, own.count));
  }
}

void Fsdp::start(const std::string& passes) {
  own_ = passes;
  own_at_ = agreed_at_ = 0;
  agreed_ = common_order(groups_.all->all_gather_bytes(passes));
  backwards_left_ = std::count(agreed_.begin(), agreed_.end(), 'B');
}

void Fsdp::begin(Pass pass) {
  const char letter = pass == Pass::kForward ? 'F' : 'B';
  BANYAN_ASSERT(own_at_ < own_.size() && own_[own_at_] == letter,
                "pass ",
                own_at_,
                " of ",
                own_,
                " is another than announced");
  ++own_at_;
  while (agreed_[agreed_at_] != letter) {
    idle(agreed_[agreed_at_++] == 'F' ? Pass::kForward : Pass::kBackward);
  }
  ++agreed_at_;
  open(pass, /*idle=*/false);
}

void Fsdp::end(Pass pass) { close(pass); }

void Fsdp::finish() {
  BANYAN_ASSERT(own_at_ == own_.size(), "passes are left of ", own_);
  while (agreed_at_ < agreed_.size()) {
    idle(agreed_[agreed_at_++] == 'F' ? Pass::kForward : Pass::kBackward);
  }
  for (size_t u = 0; u < units_.size(); ++u) drop(static_cast<int64_t>(u));
}

void Fsdp::idle(Pass pass) {
  open(pass, /*idle=*/true);
  for (const UnitUse& use : std::vector<UnitUse>(uses_)) {
    enter(use.unit);
    leave(use.unit);
  }
  close(pass);
}

void Fsdp::open(Pass pass, bool idle) {
  idle_ = idle;
  uses_ = uses_of_(pass);
  next_ = 0;
  if (pass == Pass::kBackward) --backwards_left_;
  need(0);
  if (pass == Pass::kBackward) take_gradients(0);
}

void Fsdp::close(Pass pass) {
  BANYAN_ASSERT(next_ == uses_.size(), "a pass used ", next_, " of ", uses_.size(), " units");
  if (pass == Pass::kBackward) reduce(0);
  if (pass == Pass::kBackward || options_.reshard_after_forward) drop(0);
  tasks_.drain();
  idle_ = false;
}

void Fsdp::enter(int64_t unit) {
  BANYAN_ASSERT(next_ < uses_.size() && uses_[next_].unit == unit,
                "unit ",
                unit,
                " is not the one announced at place ",
                next_);
  ask(unit);
  if (options_.forward_prefetch && next_ + 1 < uses_.size()) ask(uses_[next_ + 1].unit);
  need(unit);
  if (uses_[next_].backward) take_gradients(unit);
}

void Fsdp::leave(int64_t unit) {
  const UnitUse& use = uses_[next_++];
  BANYAN_ASSERT(use.unit == unit, "left unit ", unit, " in place of ", use.unit);
  if (use.backward) reduce(unit);
  if (use.backward || options_.reshard_after_forward) drop(unit);
}

void Fsdp::changed() {
  for (size_t u = 0; u < units_.size(); ++u) drop(static_cast<int64_t>(u));
}

at::Tensor Fsdp::gather(const at::Tensor& piece, at::ScalarType type) {
  const profile::Scope timed("gather weights", [&] {
    return profile::Work{.bytes = piece.numel() * groups_.shard->size() * 4};
  });
  return groups_.shard->all_gather(piece.to(type)).view({-1});
}

void Fsdp::ask(int64_t u) {
  Unit& unit = units_[u];
  if (unit.is_there || unit.asked != 0) return;
  ++num_gathers_;
  unit.asked = tasks_.add(
      [this, &unit, u] { unit.gathered = gather(parts_.params()[u].master, unit.gather_type); });
}

void Fsdp::need(int64_t u) {
  Unit& unit = units_[u];
  if (unit.is_there) return;
  ask(u);
  tasks_.wait(unit.asked);
  unit.asked = 0;
  // An idle rank drops what is dropped after the use anyway.
  if (!idle_ || !options_.reshard_after_forward) unit.weights->fill(unit.gathered);
  unit.gathered = at::Tensor();
  unit.is_there = true;
}

void Fsdp::drop(int64_t u) {
  if (!units_[u].is_there) return;
  units_[u].weights->drop();
  units_[u].is_there = false;
}

void Fsdp::take_gradients(int64_t u) {
  Unit& unit = units_[u];
  BANYAN_ASSERT(unit.gradients != nullptr, "a backward of a model without gradients");
  if (idle_ || unit.gradients->is_there()) return;
  unit.gradients->take();
  for (const size_t i : unit.weights->params()) whole_.params()[i].grad.zero_();
}

at::Tensor Fsdp::flat_gradients(int64_t u) {
  Unit& unit = units_[u];
  const at::Tensor& piece = parts_.params()[u].grad;
  at::Tensor flat = at::zeros({unit.piece * groups_.shard->size()}, piece.options());
  if (!unit.gradients->is_there()) return flat;  // this rank has computed none
  int64_t at = 0;
  for (const size_t i : unit.weights->params()) {
    const at::Tensor& grad = whole_.params()[i].grad;
    flat.narrow(0, at, grad.numel()).copy_(grad.view({-1}));
    at += grad.numel();
  }
  unit.gradients->drop();
  return flat;
}

void Fsdp::reduce(int64_t u) {
  if (!options_.reduce_each_pass && backwards_left_ > 0) return;
  tasks_.add([this, u, flat = flat_gradients(u)] {
    at::Tensor sum = groups_.shard->reduce_scatter_sum(flat);
    groups_.replica->all_reduce_sum(sum);
    parts_.params()[u].grad.add_(sum);
  });
}

void Fsdp::each_of(const std::vector<at::Tensor>& pieces, at::ScalarType type, const Visit& visit) {
  BANYAN_ASSERT(pieces.size() == units_.size(), "one piece per unit, got ", pieces.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    const at::Tensor flat = gather(pieces[u], type);
    int64_t at = 0;
    for (const size_t i : units_[u].weights->params()) {
      const Param& param = whole_.params()[i];
      visit(param, flat.narrow(0, at, param.master.numel()).view(param.master.sizes()));
      at += param.master.numel();
    }
  }
}

void Fsdp::each(at::ScalarType type, const Visit& visit) {
  std::vector<at::Tensor> pieces;
  for (const Param& part : parts_.params()) pieces.push_back(part.master);
  each_of(pieces, type, visit);
}

void Fsdp::hand_over(std::vector<UnitWeights>& units) {
  BANYAN_ASSERT(units.size() == units_.size(), "a model of ", units.size(), " units");
  for (size_t u = 0; u < units_.size(); ++u) {
    units[u].fill(gather(parts_.params()[u].master, units_[u].gather_type));
  }
}

}  // namespace banyan::parallel
