#include "banyan/core/spare_memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <new>
#include <system_error>

#include "banyan/core/error.h"

namespace banyan {
namespace {

[[noreturn]] void throw_file_error(const std::string& folder, const char* doing, int error) {
  throw FileError(folder + ": " + doing + ": " + std::generic_category().message(error));
}

// An open file in `folder` that no name leads to.
int unnamed_file(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw FileError(folder + ": cannot make the folder: " + error.message());
  std::string name = folder + "/banyan-offload-XXXXXX";
  const int file = mkostemp(name.data(), O_CLOEXEC);
  if (file < 0) throw_file_error(folder, "cannot make a file", errno);
  unlink(name.c_str());
  return file;
}

// Makes the file so long and takes its space, where the file system can do so. 0, or the error.
int take_space(int file, off_t num_bytes) {
#if defined(__linux__)
  if (fallocate(file, 0, 0, num_bytes) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
#endif
  return ftruncate(file, num_bytes) == 0 ? 0 : errno;
}

}  // namespace

std::shared_ptr<SpareMemory> SpareMemory::in_file(const std::string& folder, size_t num_bytes) {
  const int file = unnamed_file(folder);
  const int full = take_space(file, static_cast<off_t>(num_bytes));
  if (full != 0) {
    close(file);
    throw_file_error(folder, ("cannot take " + std::to_string(num_bytes) + " bytes").c_str(), full);
  }
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(file);
    throw_file_error(folder, "cannot map a file", error);
  }
  return std::shared_ptr<SpareMemory>(
      new SpareMemory(static_cast<std::byte*>(data), num_bytes, file));
}

std::shared_ptr<SpareMemory> SpareMemory::anonymous(size_t num_bytes) {
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return std::shared_ptr<SpareMemory>(
      new SpareMemory(static_cast<std::byte*>(data), num_bytes, /*file=*/-1));
}

SpareMemory::~SpareMemory() {
  munmap(data_, num_bytes_);
  if (file_ >= 0) close(file_);
}

void SpareMemory::drop() {
#if defined(__linux__)
  if (file_ >= 0) sync_file_range(file_, 0, 0, SYNC_FILE_RANGE_WRITE);
#else
  if (file_ >= 0) msync(data_, num_bytes_, MS_ASYNC);
#endif
  madvise(data_, num_bytes_, MADV_DONTNEED);
}

}  // namespace banyan
