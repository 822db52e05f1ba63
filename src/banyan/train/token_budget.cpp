#include "banyan/train/token_budget.h"

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <optional>
#include <sstream>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/json.h"
#include "banyan/parallel/pipeline_stage.h"
#include "banyan/rollout/memory/kv_budget.h"

namespace banyan::train {
namespace {

constexpr double kShare = 0.8;       // of what is free
constexpr int64_t kUnknown = 16384;  // verl's default
constexpr int64_t kLeast = 256;
constexpr int64_t kMost = int64_t{1} << 30;  // int32 token numbers
constexpr int64_t kRows = 4;                 // hidden rows of the head, their gradients, two copies
constexpr int64_t kNumbers = 128;            // log-probability, entropy, gradients in fp64, indices

std::string in_gib(int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1)
      << static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30) << " GiB";
  return out.str();
}

int64_t usable(const MemoryLeft& left) {
  return static_cast<int64_t>(
      kShare * static_cast<double>(std::max<int64_t>(0, left.free_bytes - left.reserved_bytes)));
}

// {"actor": {"bytes_per_token": ..., "tokens": ...}, ...}; anything else is as good as no file.
io::Json read(const std::string& file) {
  try {
    io::Json kept = io::Json::parse(io::read_text(file));
    if (kept.is_object()) return kept;
  } catch (const std::exception&) {
    // Chosen anew.
  }
  return io::Json::object();
}

std::optional<int64_t> kept_tokens(const io::Json& kept,
                                   const std::string& role,
                                   int64_t bytes_per_token) {
  const auto found = kept.find(role);
  if (found == kept.end() || !found->is_object()) return std::nullopt;
  const auto number = [&](const char* name) {
    const auto value = found->find(name);
    return value != found->end() && value->is_number_integer() ? value->get<int64_t>() : 0;
  };
  const int64_t tokens = number("tokens");
  if (number("bytes_per_token") != bytes_per_token || tokens < kLeast || tokens > kMost) {
    return std::nullopt;
  }
  return tokens;
}

}  // namespace

int64_t free_memory_bytes(at::Device device) { return rollout::read_memory(device).free; }

int64_t coming_bytes(models::CausalLM& model, bool with_moments) {
  int64_t bytes = 0;
  for (const Param& param : model.params().owned().params()) {
    const auto size = static_cast<int64_t>(param.master.nbytes());
    bytes += (param.grad.defined() ? 0 : size) + (with_moments ? 2 * size : 0);
  }
  return bytes;
}

int64_t bytes_per_token(const models::CausalLM& model) {
  const nn::ActivationBytes bytes = model.activation_bytes();
  int64_t body = bytes.total();
  if (body == 0) return 0;
  if (const parallel::PipelineStage* stage = model.stage()) {  // several blocks at one time
    body += bytes.kept * stage->num_in_flight() / stage->num_chunks() - bytes.kept;
  }
  return body +
         kRows * model.shape().hidden *
             static_cast<int64_t>(c10::elementSize(model.options().dtype)) +
         kNumbers;
}

int64_t token_budget(int64_t bytes_per_token, const MemoryLeft& left) {
  if (bytes_per_token == 0 || left.free_bytes == 0) return kUnknown;
  int64_t tokens = kLeast;
  while (tokens < kMost && 2 * tokens <= usable(left) / bytes_per_token) tokens *= 2;
  return tokens;
}

int64_t token_budget_once(const std::string& folder,
                          const std::string& role,
                          const std::string& key,
                          int64_t bytes_per_token,
                          const MemoryLeft& left,
                          const std::function<void(const std::string&)>& say) {
  const std::string file = folder + "/token_budget.json";
  io::Json kept = read(file);
  const std::optional<int64_t> before =
      bytes_per_token > 0 ? kept_tokens(kept, role, bytes_per_token) : std::nullopt;
  const bool fits = before && *before <= std::max(kLeast, left.free_bytes / bytes_per_token);
  const int64_t tokens = fits ? *before : token_budget(bytes_per_token, left);
  std::ostringstream line;
  line << role << ": blocks of at most " << tokens << " tokens, ";
  if (fits) {
    line << "as " << file << " has it";
  } else if (bytes_per_token == 0 || left.free_bytes == 0) {
    line << "since the free memory is not known";
  } else {
    line << "since " << in_gib(left.free_bytes) << " are free, " << in_gib(left.reserved_bytes)
         << " of them wait for gradients and the like, and a token takes " << bytes_per_token
         << " bytes";
  }
  say(line.str() + " (" + key + " is null)");
  if (fits) return tokens;
  kept[role] = {{"bytes_per_token", bytes_per_token}, {"tokens", tokens}};
  std::filesystem::create_directories(folder);
  io::write_text_atomic(file, kept.dump(1) + "\n");
  return tokens;
}

}  // namespace banyan::train
