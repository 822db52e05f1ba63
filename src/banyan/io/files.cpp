#include "banyan/io/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "banyan/core/error.h"
#include "banyan/io/posix_file.h"

namespace banyan::io {
namespace {

namespace fs = std::filesystem;

void write_new(const std::string& path, const std::string& text) {
  FileDescriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (file.get() < 0) throw_system_error(path, "cannot create");
  write_all(file.get(), path, text.data(), text.size());
  sync_file(file.get(), path);
  if (!file.close()) throw_system_error(path, "cannot close");
}

// Every file and folder under `root`, files first; links are not followed.
void sync_tree(const std::string& root) {
  for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
    const std::string path = entry.path().string();
    if (entry.is_symlink()) continue;
    if (entry.is_directory()) {
      sync_tree(path);
    } else if (entry.is_regular_file()) {
      sync_file(open_regular(path, nullptr).get(), path);
    }
  }
  sync_directory(root);
}

}  // namespace

std::string read_text(const std::string& path) {
  uint64_t num_bytes = 0;
  const FileDescriptor file = open_regular(path, &num_bytes);
  std::string text(num_bytes, '\0');
  read_exactly(file.get(), path, 0, text.data(), text.size());
  return text;
}

void write_text_atomic(const std::string& path, const std::string& text) {
  const std::string temporary = detail::concat(path, ".tmp-", ::getpid());
  try {
    write_new(temporary, text);
    if (::rename(temporary.c_str(), path.c_str()) != 0)
      throw_system_error(path, "cannot rename into place");
  } catch (const FileError&) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_directory(parent_directory(path));
}

void commit_directory(const std::string& from, const std::string& to) {
  try {
    sync_tree(from);
  } catch (const fs::filesystem_error& error) {
    throw FileError(detail::concat(from, ": ", error.code().message()));
  }
  // rename(2) would replace an empty folder silently.
  struct stat status;
  if (::lstat(to.c_str(), &status) == 0) throw FileError(detail::concat(to, ": exists already"));
  if (::rename(from.c_str(), to.c_str()) != 0) throw_system_error(to, "cannot rename into place");
  sync_directory(parent_directory(to));
  if (parent_directory(from) != parent_directory(to)) sync_directory(parent_directory(from));
}

}  // namespace banyan::io
