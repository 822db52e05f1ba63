// The two ways in which tokens leave the engine: whole trajectories for a trainer, events for a
// server.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "banyan/core/sample.h"
#include "banyan/rollout/control/live.h"
#include "banyan/rollout/control/outbox.h"

namespace banyan::rollout {

class TrajectoryDelivery final : public Delivery {
 public:
  void token(const Live& live, Response& response, Drawn& drawn) override;
  void ended(const Live& live, Response& response, const Outcome& outcome) override;

  // What ended since the last call, in order.
  std::vector<Trajectory> take();
  // Of the first response that failed; "" if none did.
  const std::string& error() const { return error_; }

 private:
  std::vector<Trajectory> done_;
  std::string error_;
};

class EventDelivery final : public Delivery {
 public:
  // `on_end` is called while what was written is not to be seen yet: who reads an end may count on
  // the engine knowing it.
  explicit EventDelivery(std::function<void()> on_end) : on_end_(std::move(on_end)) {}

  void begin() override { writer_.emplace(outbox_); }
  void end() override {
    on_end_();
    writer_.reset();
  }
  void token(const Live& live, Response& response, Drawn& drawn) override;
  void ended(const Live& live, Response& response, const Outcome& outcome) override;

  // A request that the loop never took ends: aborted, or with an error. From any thread.
  void refuse(const Live& live, const std::string& error);

  Outbox& outbox() { return outbox_; }
  const Outbox& outbox() const { return outbox_; }
  // Ids of requests by responses that ended since the last call. For the holder of the boundary.
  std::vector<std::string>& ended_ids() { return ended_ids_; }

 private:
  std::function<void()> on_end_;
  Outbox outbox_;
  std::optional<Outbox::Writer> writer_;
  std::vector<std::string> ended_ids_;
};

}  // namespace banyan::rollout
