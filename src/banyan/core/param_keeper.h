// Who holds the parameters of a table where no rank holds all of them (parallel/fsdp.h). The model
// names the unit of weights that it is about to use (a layer) and is done with; the keeper brings a
// unit's weights together for that time.
//
// A pass is the forward or the backward of one block. Bringing weights together takes all ranks, so
// every rank goes through one list of passes that all have agreed on, and through those that it has
// no block for as well.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace at {
class Tensor;
}  // namespace at

namespace banyan {

class ParamTable;

enum class Pass : uint8_t { kForward, kBackward };

// One use of a unit within a pass. The root (unit 0: what is used outside of layers) is there from
// the begin of a pass to its end and in no list.
struct UnitUse {
  int64_t unit = 0;
  bool backward = false;  // its gradients are complete when it is left
};

class ParamKeeper {
 public:
  virtual ~ParamKeeper() = default;

  // (all ranks) What this rank is about to do, 'F' and 'B' for its passes; it may be nothing.
  virtual void start(const std::string& passes) = 0;
  // (all) Before and after each of these.
  virtual void begin(Pass pass) = 0;
  virtual void end(Pass pass) = 0;
  // (all) Goes through the passes that only other ranks have left.
  virtual void finish() = 0;

  // Around the uses of a unit, in the order that the model has announced (CausalLM::unit_uses).
  virtual void enter(int64_t unit) = 0;
  virtual void leave(int64_t unit) = 0;

  // This rank's part of the parameters, one per unit: masters and, after a backward, the sums of
  // their gradients. What the optimizer moves.
  virtual ParamTable& parts() = 0;
  // The parts have other values.
  virtual void changed() = 0;
  // Takes this rank's part of the whole values of a parameter.
  virtual void put(size_t param, const at::Tensor& values) = 0;
};

}  // namespace banyan
