#include "banyan/checkpoint/folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>

#include "banyan/checkpoint/manifest.h"
#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/posix_file.h"

namespace banyan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::banyan::detail::concat;

constexpr const char* kStepPrefix = "global_step_";
constexpr const char* kTemporaryPrefix = ".tmp-global_step_";

std::optional<int64_t> step_of(const std::string& name) {
  const std::string prefix = kStepPrefix;
  if (!name.starts_with(prefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + prefix.size(), end, step);
  const bool canonical = error == std::errc() && rest == end && name == concat(prefix, step);
  return canonical && step >= 0 ? std::optional(step) : std::nullopt;
}

std::vector<fs::path> entries(const std::string& directory) {
  std::error_code error;
  std::vector<fs::path> out;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    out.push_back(it->path());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw FileError(concat(directory, ": ", error.message()));
  }
  return out;
}

void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    io::throw_system_error(to, "cannot rename into place");
}

// Exchanges two names in one step; false where the file system cannot.
bool exchange(const std::string& a, const std::string& b) {
#if defined(RENAME_EXCHANGE)
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
#else
  return false;
#endif
}

}  // namespace

std::string step_path(const std::string& directory, int64_t step) {
  return concat(directory, "/", kStepPrefix, step);
}

std::string temporary_path(const std::string& directory, int64_t step) {
  return concat(directory, "/", kTemporaryPrefix, step, "-", ::getpid());
}

std::vector<Listed> list_checkpoints(const std::string& directory) {
  std::vector<Listed> out;
  for (const fs::path& path : entries(directory)) {
    const std::optional<int64_t> step = step_of(path.filename().string());
    if (!step || !fs::is_directory(fs::symlink_status(path))) continue;
    Listed listed{*step, std::numeric_limits<int64_t>::max(), path.string(), ""};
    try {
      const Manifest manifest = read_manifest(listed.path);
      if (manifest.trainer.global_step != *step) {
        throw FileError(concat(listed.path,
                               "/",
                               kManifestFile,
                               ": step: wanted ",
                               *step,
                               ", got ",
                               manifest.trainer.global_step));
      }
      listed.sequence = manifest.sequence;
    } catch (const FileError& error) {
      listed.problem = error.what();
    }
    out.push_back(std::move(listed));
  }
  std::sort(out.begin(), out.end(), [](const Listed& a, const Listed& b) {
    return a.sequence != b.sequence ? a.sequence > b.sequence : a.step > b.step;
  });
  return out;
}

void publish(const std::string& temporary, const std::string& directory, int64_t step) {
  const std::string target = step_path(directory, step);
  if (!fs::exists(fs::symlink_status(target))) {
    io::commit_directory(temporary, target);
    return;
  }
  const std::string staged = temporary + "-staged";
  io::commit_directory(temporary, staged);
  if (!exchange(staged, target)) {
    const std::string aside = temporary + "-old";
    rename_path(target, aside);
    rename_path(staged, target);
  }
  io::sync_directory(directory);
}

void remove_leftovers(const std::string& directory) {
  for (const fs::path& path : entries(directory)) {
    if (!path.filename().string().starts_with(kTemporaryPrefix)) continue;
    std::error_code error;
    fs::remove_all(path, error);
    if (error) throw FileError(concat(path.string(), ": cannot remove: ", error.message()));
  }
}

void remove_old(const std::string& directory, int64_t max_to_keep) {
  if (max_to_keep <= 0) return;
  int64_t kept = 0;
  for (const Listed& listed : list_checkpoints(directory)) {
    if (!listed.problem.empty() || ++kept <= max_to_keep) continue;
    // Renamed first: a removal cut short leaves a leftover, not half a checkpoint.
    rename_path(listed.path, concat(temporary_path(directory, listed.step), "-removed"));
  }
}

}  // namespace banyan::checkpoint
