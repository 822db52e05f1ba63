// Scope timer: where the time of a step goes, op by op, with the arithmetic and the memory traffic
// that each op stands for.
//
//   const profile::Scope timed("swiglu", [&] { return profile::Work{.bytes = 6 * tokens * width};
//   });
//
// Off, which is the default, a scope is one load and one branch; the work is not computed and
// nothing is allocated. On, it is two readings of the clock and an entry in a buffer of its thread.
// No result depends on it. Reports are core/profile_report.h.
//
// A scope times the thread that opens it: of an op that a device runs on its own, the launch alone.
//
// at::RecordFunction does not serve here: it times ATen's operators, knows no FLOPs or bytes of
// ours, and code without torch (the planner, the kernels) could not use it. Torch-free.
//
// Being on is the one mutable global of the core: a timer that every op had to be handed would
// stand in every signature.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace banyan::profile {

// What the current thread is doing; ops carry it in the table.
enum class Phase : uint8_t {
  kOther,
  kRollout,
  kScore,  // passes without gradients: old and reference log-probabilities, values
  kForward,
  kLoss,
  kBackward,
  kRecompute,  // forward once more, for its backward
  kOptimizer,
};

const char* phase_name(Phase phase);

// Of one call of an op. Multiplications and additions are counted one each.
struct Work {
  int64_t flops = 0;     // that the result needs
  int64_t repeated = 0;  // done again, because an earlier op did not store its result
  int64_t bytes = 0;     // of operands and results, each once
  int64_t rows = 0;      // shape [rows, columns] of a weight, told apart in the table
  int64_t columns = 0;
};

struct Event {
  const char* name = "";
  Phase phase = Phase::kOther;
  int32_t thread = 0;  // counted in the order in which threads began their first scope
  int32_t depth = 0;   // scopes of the thread that were open at its begin
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  Work work = {};
};

// Forgets earlier events and records from now on.
void start();

// Stops recording. Closed scopes in the order of their begin, thread by thread; what is still open
// is dropped.
std::vector<Event> stop();

namespace detail {
extern std::atomic<bool> enabled;
struct Buffer;
}  // namespace detail

inline bool is_on() { return detail::enabled.load(std::memory_order_relaxed); }

// Times from construction to destruction, on one thread. `name` must outlive the recording: a
// literal, without quotes or backslashes.
class Scope {
 public:
  explicit Scope(const char* name) {
    if (is_on()) [[unlikely]]
      begin(name, {});
  }
  // `work`: a function that returns a Work; called only while profiling.
  template <typename Function>
  Scope(const char* name, const Function& work) {
    if (is_on()) [[unlikely]]
      begin(name, work());
  }
  ~Scope() {
    if (buffer_ != nullptr) [[unlikely]]
      end();
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  void begin(const char* name, const Work& work);
  void end();

  detail::Buffer* buffer_ = nullptr;
  int64_t recording_ = 0;  // which start() it belongs to
  int64_t index_ = 0;
};

// A scope that also sets the phase of its thread until it ends. In scoring and in recomputation the
// phase of an inner scope is not taken: forward code need not know why it runs.
class PhaseScope {
 public:
  explicit PhaseScope(Phase phase);
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Phase before_;
  Scope scope_;
};

}  // namespace banyan::profile
