// Saving: temporary folder, weights, state, manifest, one rename, tracker, and only then removal of
// old ones. Loading: verify everything, compare every name, shape and type with the model, and only
// then copy.
#include "banyan/checkpoint/checkpoint.h"

#include <filesystem>

#include "banyan/checkpoint/folder.h"
#include "banyan/checkpoint/manifest.h"
#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/posix_file.h"
#include "banyan/io/safetensors.h"

namespace banyan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::banyan::detail::concat;

constexpr const char* kCriticFolder = "/critic";
constexpr const char* kTrackerFile = "latest_checkpointed_iteration.txt";  // verl's name

std::string first_moment(const std::string& name) { return "m." + name; }
std::string second_moment(const std::string& name) { return "v." + name; }

// A tensor of the run and the name and file it has in a checkpoint.
struct Stored {
  std::string file;
  std::string name;
  at::Tensor tensor;
};

std::vector<Stored> stored_tensors(models::CausalLM& model, optim::AdamW& optimizer) {
  const std::vector<Param>& params = model.params().params();
  BANYAN_ASSERT(optimizer.first_moments().size() == params.size(),
                "checkpoint: the optimizer belongs to another model");
  std::vector<Stored> out;
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string& name = params[i].name;
    out.push_back({kMasterFile, name, params[i].master});
    out.push_back({kMomentsFile, first_moment(name), optimizer.first_moments()[i]});
    out.push_back({kMomentsFile, second_moment(name), optimizer.second_moments()[i]});
  }
  return out;
}

void write_state(const std::string& path, const std::vector<Stored>& all, Manifest manifest) {
  std::error_code error;
  fs::create_directory(path + "/state", error);
  if (error) throw FileError(concat(path, "/state: ", error.message()));
  for (const char* file : {kMasterFile, kMomentsFile}) {
    std::vector<io::NamedTensor> tensors;
    for (const Stored& stored : all) {
      if (stored.file == file) tensors.push_back({stored.name, stored.tensor});
    }
    io::write_safetensors(path + "/" + file, tensors);
  }
  for (const Stored& stored : all) {
    const std::vector<int64_t> shape = stored.tensor.sizes().vec();
    manifest.tensors[stored.name] = {shape, std::vector<int64_t>(shape.size(), 0), stored.file};
  }
  write_manifest(path, std::move(manifest));
}

// Sequence of the next save: one more than any readable manifest has.
int64_t next_sequence(const std::string& directory) {
  int64_t next = 1;
  for (const Listed& listed : list_checkpoints(directory)) {
    if (listed.problem.empty()) next = std::max(next, listed.sequence + 1);
  }
  return next;
}

// A whole model with its state; `manifest` says what is not in the files.
void write_part(const std::string& path,
                models::CausalLM& model,
                optim::AdamW& optimizer,
                const std::string& config_from,
                Manifest manifest) {
  manifest.optimizer_steps = optimizer.num_steps();
  models::save_model(model, config_from, path, at::kBFloat16);
  write_state(path, stored_tensors(model, optimizer), std::move(manifest));
}

void save_unchecked(const std::string& directory,
                    models::CausalLM& model,
                    optim::AdamW& optimizer,
                    const TrainerState& state,
                    const std::string& config_from,
                    const Critic* critic) {
  fs::create_directories(directory);
  remove_leftovers(directory);
  const std::string temporary = temporary_path(directory, state.global_step);
  Manifest manifest;
  manifest.sequence = next_sequence(directory);
  manifest.trainer = state;
  models::save_model(model, config_from, temporary, at::kBFloat16);
  // The critic first: the outer manifest is written last and covers its files.
  if (critic != nullptr) {
    write_part(temporary + kCriticFolder,
               *critic->model,
               *critic->optimizer,
               critic->config_from,
               manifest);
  }
  manifest.optimizer_steps = optimizer.num_steps();
  write_state(temporary, stored_tensors(model, optimizer), std::move(manifest));
  publish(temporary, directory, state.global_step);
  io::write_text_atomic(directory + "/" + kTrackerFile, concat(state.global_step));
}

[[noreturn]] void refuse(const std::string& file,
                         const std::string& tensor,
                         const std::string& why) {
  throw FileError(concat(file, ": ", tensor, ": ", why));
}

// Throws unless `file` holds exactly the tensors of `all` that belong to it, with their shapes and
// types.
void check_contents(const io::SafetensorsFile& file,
                    const std::string& name,
                    const std::vector<Stored>& all) {
  size_t wanted = 0;
  for (const Stored& stored : all) {
    if (stored.file != name) continue;
    ++wanted;
    const auto found = file.entries().find(stored.name);
    if (found == file.entries().end()) refuse(file.path(), stored.name, "missing");
    if (stored.tensor.sizes() != found->second.shape) {
      refuse(file.path(),
             stored.name,
             concat("shape: the model has ",
                    stored.tensor.sizes(),
                    ", the file ",
                    at::IntArrayRef(found->second.shape)));
    }
    if (stored.tensor.scalar_type() != found->second.dtype) {
      refuse(file.path(),
             stored.name,
             concat("type: the model has ",
                    stored.tensor.scalar_type(),
                    ", the file ",
                    found->second.dtype));
    }
  }
  if (file.entries().size() != wanted) {
    throw FileError(
        concat(file.path(), ": wanted ", wanted, " tensors, got ", file.entries().size()));
  }
}

// The state of one model in a checkpoint, opened and compared with the model, ready to be copied.
class StateFiles {
 public:
  StateFiles(const std::string& path, std::vector<Stored> all)
      : all_(std::move(all)),
        masters_(path + "/" + kMasterFile),
        moments_(path + "/" + kMomentsFile) {
    check_contents(masters_, kMasterFile, all_);
    check_contents(moments_, kMomentsFile, all_);
  }

  void restore(int64_t num_steps, models::CausalLM& model, optim::AdamW& optimizer) const {
    for (const Stored& stored : all_) {
      const io::SafetensorsFile& file = stored.file == kMasterFile ? masters_ : moments_;
      at::Tensor(stored.tensor).copy_(file.read(stored.name));
    }
    optimizer.take_moments();
    optimizer.set_num_steps(num_steps);
    model.params().repack();
  }

 private:
  std::vector<Stored> all_;
  io::SafetensorsFile masters_;
  io::SafetensorsFile moments_;
};

}  // namespace

void save(const std::string& directory,
          models::CausalLM& model,
          optim::AdamW& optimizer,
          const TrainerState& state,
          const std::string& config_from,
          int64_t max_to_keep,
          const Critic* critic) {
  const auto clean_up = [&] {
    std::error_code ignored;
    fs::remove_all(temporary_path(directory, state.global_step), ignored);
  };
  try {
    save_unchecked(directory, model, optimizer, state, config_from, critic);
    remove_old(directory, max_to_keep);
    remove_leftovers(directory);
  } catch (const fs::filesystem_error& error) {
    clean_up();
    throw FileError(error.what());
  } catch (...) {
    clean_up();
    throw;
  }
}

std::optional<Found> find_latest(const std::string& directory) {
  Found found;
  for (const Listed& listed : list_checkpoints(directory)) {
    try {
      if (!listed.problem.empty()) throw FileError(listed.problem);
      verify_files(listed.path, read_manifest(listed.path));
      found.path = listed.path;
      return found;
    } catch (const FileError& error) {
      found.rejected.push_back(concat(listed.path, ": ", error.what()));
    }
  }
  if (found.rejected.empty()) return std::nullopt;
  std::string reasons;
  for (const std::string& reason : found.rejected) reasons += "\n  " + reason;
  throw FileError(concat(directory, ": no checkpoint here can be trusted", reasons));
}

TrainerState load(const std::string& path,
                  models::CausalLM& model,
                  optim::AdamW& optimizer,
                  const LoadOptions& options) {
  const Manifest manifest = read_manifest(path);
  if (!options.verified) verify_files(path, manifest);
  optimizer.make_moments();
  if (options.critic != nullptr) options.critic->optimizer->make_moments();
  const StateFiles actor(path, stored_tensors(model, optimizer));
  if (options.critic == nullptr) {
    actor.restore(manifest.optimizer_steps, model, optimizer);
    return manifest.trainer;
  }
  const std::string folder = path + kCriticFolder;
  if (!manifest.files.contains(std::string("critic/") + kManifestFile)) {
    throw FileError(concat(path, ": no critic in it; it was saved by a run without one"));
  }
  const Manifest critic_manifest = read_manifest(folder);
  const StateFiles critic(folder,
                          stored_tensors(*options.critic->model, *options.critic->optimizer));
  actor.restore(manifest.optimizer_steps, model, optimizer);
  critic.restore(
      critic_manifest.optimizer_steps, *options.critic->model, *options.critic->optimizer);
  return manifest.trainer;
}

}  // namespace banyan::checkpoint
