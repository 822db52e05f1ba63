#include "banyan/io/posix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "banyan/core/error.h"

namespace banyan::io {
namespace {

// One read or write call moves at most this much (Linux itself stops just below 2 GiB).
constexpr size_t kMaxTransfer = size_t{1} << 30;

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "something else";
}

}  // namespace

void throw_system_error(const std::string& path, const std::string& doing) {
  const int error = errno;
  throw FileError(detail::concat(path, ": ", doing, ": ", std::strerror(error)));
}

int FileDescriptor::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

bool FileDescriptor::close() {
  const int fd = release();
  return fd < 0 || ::close(fd) == 0;
}

FileDescriptor open_regular(const std::string& path, uint64_t* num_bytes) {
  // Without O_NONBLOCK the open itself would wait for the other end of a pipe.
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) throw_system_error(path, "cannot open");
  struct stat status;
  if (::fstat(file.get(), &status) != 0) throw_system_error(path, "cannot stat");
  if (!S_ISREG(status.st_mode)) {
    throw FileError(detail::concat(path, ": wanted a regular file, got ", kind_of(status.st_mode)));
  }
  if (num_bytes) *num_bytes = static_cast<uint64_t>(status.st_size);
  return file;
}

void read_exactly(int fd, const std::string& path, uint64_t offset, void* out, size_t num_bytes) {
  char* cursor = static_cast<char*>(out);
  while (num_bytes > 0) {
    const ssize_t got =
        ::pread(fd, cursor, std::min(num_bytes, kMaxTransfer), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_system_error(path, "cannot read");
    if (got == 0) {
      throw FileError(
          detail::concat(path, ": ends ", num_bytes, " bytes early: it was cut while it was read"));
    }
    cursor += got;
    offset += static_cast<uint64_t>(got);
    num_bytes -= static_cast<size_t>(got);
  }
}

void write_all(int fd, const std::string& path, const void* data, size_t num_bytes) {
  const char* cursor = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t put = ::write(fd, cursor, std::min(num_bytes, kMaxTransfer));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_system_error(path, "cannot write");
    cursor += put;
    num_bytes -= static_cast<size_t>(put);
  }
}

void sync_file(int fd, const std::string& path) {
  if (::fsync(fd) != 0) throw_system_error(path, "cannot sync to disk");
}

void sync_directory(const std::string& path) {
  FileDescriptor folder(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY));
  if (folder.get() < 0) throw_system_error(path, "cannot open folder");
  sync_file(folder.get(), path);
}

std::string parent_directory(const std::string& path) {
  const size_t last = path.find_last_not_of('/');
  if (last == std::string::npos) return path.empty() ? "." : "/";
  const size_t slash = path.find_last_of('/', last);
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace banyan::io
