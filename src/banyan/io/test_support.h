// For tests of files: a folder of one's own that disappears, and the message of the FileError that
// a call throws.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "banyan/core/error.h"

namespace banyan::io {

class TempDirectory {
 public:
  TempDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "banyan-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDirectory() { std::filesystem::remove_all(path_); }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// The text of the FileError, or "" if the call succeeded.
template <typename Call>
std::string file_error_of(Call&& call) {
  try {
    call();
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

}  // namespace banyan::io
