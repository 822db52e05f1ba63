// A file descriptor that closes itself, and the few system calls that io/ makes, with FileError
// instead of errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace banyan::io {

// Throws FileError "<path>: <doing>: <reason of the system>".
[[noreturn]] void throw_system_error(const std::string& path, const std::string& doing);

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { close(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const { return fd_; }
  int release();
  bool close();  // false if the system reports a late write error

 private:
  int fd_ = -1;
};

// Opens a regular file for reading. Links are followed (the HF cache keeps its snapshots as links),
// but what they lead to must be a regular file: a pipe, socket, device or folder is refused without
// being read.
FileDescriptor open_regular(const std::string& path, uint64_t* num_bytes);

// Fills `out` from `offset`; a file that ends too early has been cut while it was read.
void read_exactly(int fd, const std::string& path, uint64_t offset, void* out, size_t num_bytes);

// Writes everything, however many calls it takes.
void write_all(int fd, const std::string& path, const void* data, size_t num_bytes);

void sync_file(int fd, const std::string& path);
void sync_directory(const std::string& path);

// The folder part of a path ("." if there is none).
std::string parent_directory(const std::string& path);

}  // namespace banyan::io
