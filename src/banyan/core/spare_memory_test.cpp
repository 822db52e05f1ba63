#include "banyan/core/spare_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "banyan/core/error.h"
#include "banyan/core/memory.h"

namespace banyan {
namespace {

constexpr size_t kBytes = 1 << 20;

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "banyan-spare-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_; }

 private:
  std::string path_;
};

bool all_are(const SpareMemory& memory, int value) {
  return std::all_of(memory.data(), memory.data() + memory.num_bytes(), [&](std::byte b) {
    return b == static_cast<std::byte>(value);
  });
}

TEST(Memory, DiscardGivesWholePagesBackAndLeavesTheEnds) {
  constexpr size_t kPage = 4096;
  const auto memory = SpareMemory::anonymous(kBytes);
  std::memset(memory->data(), 7, kBytes);
  discard(memory->data() + 1, kBytes - 2);
  if (resident_bytes() > 0) {  // there is a /proc
    EXPECT_EQ(resident_bytes_of(memory->data(), kBytes), static_cast<int64_t>(2 * kPage));
  }
  EXPECT_EQ(memory->data()[kPage - 1], std::byte{7});
  EXPECT_EQ(memory->data()[kPage], std::byte{0});
  EXPECT_EQ(memory->data()[kBytes - kPage], std::byte{7});
  discard(memory->data(), 10);
  EXPECT_EQ(memory->data()[0], std::byte{7});
}

TEST(SpareMemory, AFileKeepsTheValuesWhileThePagesAreGone) {
  const Folder folder;
  const auto memory = SpareMemory::in_file(folder.path() + "/new/sub", kBytes);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path() + "/new/sub"));  // the file has no name
  EXPECT_TRUE(all_are(*memory, 0));
  std::memset(memory->data(), 7, kBytes);
  const int64_t before = resident_bytes_of(memory->data(), kBytes);
  memory->drop();
  EXPECT_EQ(resident_bytes_of(memory->data(), kBytes), 0);
  if (resident_bytes() > 0) {  // there is a /proc
    EXPECT_EQ(before, static_cast<int64_t>(kBytes));
  }
  EXPECT_TRUE(all_are(*memory, 7));
  memory->data()[3] = std::byte{9};
  memory->drop();
  EXPECT_EQ(memory->data()[3], std::byte{9});
}

TEST(SpareMemory, WithoutAFileTheValuesAreZerosAgain) {
  const auto memory = SpareMemory::anonymous(kBytes);
  std::memset(memory->data(), 7, kBytes);
  memory->drop();
  EXPECT_EQ(resident_bytes_of(memory->data(), kBytes), 0);
  EXPECT_TRUE(all_are(*memory, 0));
}

TEST(SpareMemory, AFolderThatCannotBeIsNamed) {
  const Folder folder;
  for (const size_t num_bytes : {kBytes, size_t{1} << 60}) {
    const std::string where = num_bytes == kBytes ? "/dev/null/folder" : folder.path();
    try {
      SpareMemory::in_file(where, num_bytes);
      FAIL() << "an error was expected";
    } catch (const FileError& error) {
      EXPECT_EQ(std::string(error.what()).rfind(where + ": cannot ", 0), 0u) << error.what();
    }
  }
}

}  // namespace
}  // namespace banyan
