#include "banyan/parallel/lockstep.h"

#include "banyan/core/error.h"
#include "banyan/parallel/pass_order.h"

namespace banyan::parallel {
namespace {

Pass pass_of(char letter) { return letter == 'F' ? Pass::kForward : Pass::kBackward; }

}  // namespace

void Lockstep::start(const std::string& passes) {
  agreed_ = common_order(ranks_.all_gather_bytes(passes));
  next_ = 0;
}

void Lockstep::begin(Pass pass) {
  while (next_ < agreed_.size() && pass_of(agreed_[next_]) != pass) {
    idle_(pass_of(agreed_[next_++]));
  }
  BANYAN_ASSERT(next_ < agreed_.size(), "a pass that was not announced: ", agreed_);
  ++next_;
}

void Lockstep::finish() {
  while (next_ < agreed_.size()) idle_(pass_of(agreed_[next_++]));
}

}  // namespace banyan::parallel
