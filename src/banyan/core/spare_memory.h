// Memory that can be out of the way while nobody reads it: pages of an unnamed file, whose values
// stay on disk, or pages without a file, whose values are lost. Torch-free.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace banyan {

class SpareMemory {
 public:
  // Zeroed bytes of a file in `folder` (made if missing). The file has no name and goes with the
  // object; its space is taken at once where the file system can, so that a full disk is an error
  // here and not a signal later. Throws FileError naming the folder.
  static std::shared_ptr<SpareMemory> in_file(const std::string& folder, size_t num_bytes);
  // Zeroed bytes without a file. Throws std::bad_alloc.
  static std::shared_ptr<SpareMemory> anonymous(size_t num_bytes);

  ~SpareMemory();
  SpareMemory(const SpareMemory&) = delete;
  SpareMemory& operator=(const SpareMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

  // The pages leave this process. What is touched afterwards comes back: from the file with its
  // values, without one as zeros. Starts to write changed pages back and does not wait for it.
  void drop();

 private:
  SpareMemory(std::byte* data, size_t num_bytes, int file)
      : data_(data), num_bytes_(num_bytes), file_(file) {}

  std::byte* data_;
  size_t num_bytes_;
  int file_;  // -1: none
};

}  // namespace banyan
