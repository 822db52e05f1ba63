// Saving: temporary folder, weights, state, manifest, one rename, tracker, and only then removal of
// old ones. Loading: verify everything, compare every name, shape and type with the model, and only
// then copy.
#include "banyan/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include "banyan/checkpoint/folder.h"
#include "banyan/checkpoint/manifest.h"
#include "banyan/checkpoint/pieces.h"
#include "banyan/checkpoint/state_reader.h"
#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/posix_file.h"
#include "banyan/io/safetensors.h"
#include "banyan/parallel/weight_view.h"

namespace banyan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::banyan::detail::concat;

constexpr const char* kCriticFolder = "/critic";
constexpr const char* kTrackerFile = "latest_checkpointed_iteration.txt";  // verl's name

// A tensor of the run and the name and file it has in a checkpoint.
struct Stored {
  std::string file;
  std::string name;
  at::Tensor tensor;
  Cut cut = {};        // what of the stored tensor this is
  int64_t begin = -1;  // or the numbers from here on, row after row

  std::vector<int64_t> shape() const { return cut.whole_shape(tensor.sizes()); }
};

std::vector<Stored> stored_tensors(models::CausalLM& model, optim::AdamW& optimizer) {
  const std::vector<Param>& params = model.params().params();
  BANYAN_ASSERT(optimizer.first_moments().size() == params.size(),
                "checkpoint: the optimizer belongs to another model");
  std::vector<Stored> out;
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string& name = params[i].name;
    const Cut& cut = params[i].cut;
    out.push_back({kMasterFile, name, params[i].master, cut});
    out.push_back({kMomentsFile, first_moment(name), optimizer.first_moments()[i], cut});
    out.push_back({kMomentsFile, second_moment(name), optimizer.second_moments()[i], cut});
  }
  return out;
}

// What this rank fills from a checkpoint.
std::vector<Stored> loaded_tensors(models::CausalLM& model, optim::AdamW& optimizer) {
  parallel::Fsdp* parts = parts_of(model.params());
  if (parts == nullptr) return stored_tensors(model, optimizer);
  std::vector<Stored> out;
  for (const parallel::OwnedRange& own : parts->owned(parts->shard().rank())) {
    const std::string& name = model.params().params()[own.param].name;
    const auto run = [&](const at::Tensor& part) { return part.narrow(0, own.at, own.count); };
    const at::Tensor& master = parts->parts().params()[own.unit].master;
    const at::Tensor& first = optimizer.first_moments()[own.unit];
    const at::Tensor& second = optimizer.second_moments()[own.unit];
    out.push_back({kMasterFile, name, run(master), {}, own.begin});
    out.push_back({kMomentsFile, first_moment(name), run(first), {}, own.begin});
    out.push_back({kMomentsFile, second_moment(name), run(second), {}, own.begin});
  }
  return out;
}

// What a checkpoint of the model must hold, whoever wrote it.
std::vector<WantedTensor> wanted_tensors(models::CausalLM& model) {
  std::vector<WantedTensor> out;
  const at::ScalarType dtype = model.options().dtype == at::kDouble ? at::kDouble : at::kFloat;
  for (const auto& [name, shape] : model.tensors()) {  // also those that other ranks load
    out.push_back({kMasterFile, name, shape, dtype});
    out.push_back({kMomentsFile, first_moment(name), shape, dtype});
    out.push_back({kMomentsFile, second_moment(name), shape, dtype});
  }
  return out;
}

bool is_first(const parallel::Groups* groups) {
  return groups == nullptr || groups->world.is_first();
}

// One model of a checkpoint to be.
struct Outgoing {
  models::CausalLM& model;
  optim::AdamW& optimizer;
  std::string config_from;
  parallel::Fsdp* parts;        // null: its tensors are brought together
  std::vector<Stored> tensors;  // whole, on the first rank only; masters alone if in parts
};

// All bring their parts.
Outgoing outgoing(models::CausalLM& model,
                  optim::AdamW& optimizer,
                  const std::string& config_from,
                  parallel::Groups* groups) {
  Outgoing out{model, optimizer, config_from, parts_of(model.params()), {}};
  if (groups == nullptr) {
    out.tensors = stored_tensors(model, optimizer);
    return out;
  }
  if (out.parts != nullptr) {
    out.parts->each(at::kBFloat16, [&](const Param& param, const at::Tensor& whole) {
      if (groups->world.is_first()) out.tensors.push_back({kMasterFile, param.name, whole});
    });
    return out;
  }
  const auto keep = [&](const char* file, const char* prefix) {
    return [&out, groups, file, prefix](const std::string& name, const at::Tensor& whole) {
      if (groups->world.is_first()) out.tensors.push_back({file, prefix + name, whole});
    };
  };
  const parallel::WeightView view(model.params(), *groups);
  view.each(keep(kMasterFile, ""));
  view.each_of(optimizer.first_moments(), keep(kMomentsFile, "m."));
  view.each_of(optimizer.second_moments(), keep(kMomentsFile, "v."));
  return out;
}

// An HF directory of the masters, with room for the state.
void write_model(const std::string& path, const Outgoing& from) {
  std::map<std::string, at::Tensor> masters;
  for (const Stored& stored : from.tensors) {
    if (stored.file == kMasterFile) masters[stored.name] = stored.tensor;
  }
  models::save_model(from.model, from.config_from, path, at::kBFloat16, &masters);
  fs::create_directory(path + "/state");
}

void write_state(const std::string& path, const Outgoing& from, Manifest manifest) {
  manifest.optimizer_steps = from.optimizer.num_steps();
  if (from.parts != nullptr) {
    add_places(*from.parts, manifest);
    return write_manifest(path, std::move(manifest));
  }
  for (const char* file : {kMasterFile, kMomentsFile}) {
    std::vector<io::NamedTensor> tensors;
    for (const Stored& stored : from.tensors) {
      if (stored.file == file) tensors.push_back({stored.name, stored.tensor});
    }
    io::write_safetensors(path + "/" + file, tensors);
  }
  for (const Stored& stored : from.tensors) {
    const std::vector<int64_t> shape = stored.tensor.sizes().vec();
    manifest.tensors[stored.name] = {shape, std::vector<int64_t>(shape.size(), 0), stored.file, {}};
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

// Runs `part` of a save on every rank; where it fails on one, all throw its FileError.
void together(parallel::Groups* groups, const std::function<void()>& part) {
  std::string problem;
  try {
    part();
  } catch (const fs::filesystem_error& error) {
    problem = error.what();
  } catch (const FileError& error) {
    problem = error.what();
  }
  std::vector<std::string> problems = {problem};
  if (groups != nullptr) problems = groups->world.all_gather_bytes(problem);
  for (const std::string& each : problems) {
    if (!each.empty()) throw FileError(each);
  }
}

// The folder appears under its name when every rank has written its files.
void save_into(const std::string& temporary,
               const std::string& directory,
               const TrainerState& state,
               const std::vector<Outgoing>& models,
               parallel::Groups* groups) {
  const auto folder = [&](size_t i) { return temporary + (i == 0 ? "" : kCriticFolder); };
  Manifest manifest;
  manifest.trainer = state;
  together(groups, [&] {
    if (!is_first(groups)) return;
    fs::create_directories(directory);
    remove_leftovers(directory);
    manifest.sequence = next_sequence(directory);
    for (size_t i = 0; i < models.size(); ++i) write_model(folder(i), models[i]);
  });
  const auto in_parts = [](const Outgoing& each) { return each.parts != nullptr; };
  if (std::any_of(models.begin(), models.end(), in_parts)) {
    together(groups, [&] {
      for (size_t i = 0; i < models.size(); ++i) {
        if (!in_parts(models[i])) continue;
        write_pieces(folder(i), *models[i].parts, models[i].optimizer);
      }
    });
  }
  together(groups, [&] {
    if (!is_first(groups)) return;
    if (!state.ahead.empty()) io::write_text_atomic(temporary + "/" + kAheadFile, state.ahead);
    // The critic first: the outer manifest is written last and covers its files.
    for (size_t i = models.size(); i-- > 0;) write_state(folder(i), models[i], manifest);
    publish(temporary, directory, state.global_step);
    io::write_text_atomic(directory + "/" + kTrackerFile, concat(state.global_step));
  });
}

// The state of one model in a checkpoint, opened and compared with the model, ready to be copied.
class StateFiles {
 public:
  StateFiles(const std::string& path,
             const Manifest& manifest,
             models::CausalLM& model,
             optim::AdamW& optimizer)
      : num_steps_(manifest.optimizer_steps),
        model_(model),
        optimizer_(optimizer),
        all_(loaded_tensors(model, optimizer)),
        reader_(path, manifest, wanted_tensors(model)) {}

  void restore() const {
    for (const Stored& stored : all_) {
      at::Tensor to = stored.tensor;
      if (stored.begin >= 0) {
        to.copy_(reader_.read_run(stored.name, stored.begin, to.numel()));
      } else if (stored.cut.is_whole()) {
        to.copy_(reader_.read(stored.name));
      } else {
        const int64_t dim = stored.cut.dim;
        to.copy_(reader_.read_part(stored.name, dim, stored.cut.begin, to.size(dim)));
      }
    }
    optimizer_.take_moments();
    optimizer_.set_num_steps(num_steps_);
    model_.params().repack();
  }

 private:
  int64_t num_steps_;
  models::CausalLM& model_;
  optim::AdamW& optimizer_;
  std::vector<Stored> all_;
  StateReader reader_;
};

}  // namespace

void save(const std::string& directory,
          models::CausalLM& model,
          optim::AdamW& optimizer,
          const TrainerState& state,
          const std::string& config_from,
          int64_t max_to_keep,
          const Critic* critic,
          parallel::Groups* groups) {
  std::vector<Outgoing> models = {outgoing(model, optimizer, config_from, groups)};
  if (critic != nullptr) {
    models.push_back(outgoing(*critic->model, *critic->optimizer, critic->config_from, groups));
  }
  std::string temporary = temporary_path(directory, state.global_step);
  if (groups != nullptr) temporary = groups->world.broadcast_bytes(temporary, 0);
  try {
    save_into(temporary, directory, state, models, groups);
  } catch (...) {
    std::error_code ignored;
    if (is_first(groups)) fs::remove_all(temporary, ignored);
    throw;
  }
  together(groups, [&] {
    if (!is_first(groups)) return;
    remove_old(directory, max_to_keep);
    remove_leftovers(directory);
  });
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
  const StateFiles actor(path, manifest, model, optimizer);
  TrainerState state = manifest.trainer;
  if (manifest.files.contains(kAheadFile)) state.ahead = io::read_text(path + "/" + kAheadFile);
  if (options.critic == nullptr) {
    actor.restore();
    return state;
  }
  const std::string folder = path + kCriticFolder;
  if (!manifest.files.contains(std::string("critic/") + kManifestFile)) {
    throw FileError(concat(path, ": no critic in it; it was saved by a run without one"));
  }
  const StateFiles critic(
      folder, read_manifest(folder), *options.critic->model, *options.critic->optimizer);
  actor.restore();
  critic.restore();
  return state;
}

}  // namespace banyan::checkpoint
