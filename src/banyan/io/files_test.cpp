#include "banyan/io/files.h"

#include <sys/stat.h>

#include "banyan/io/test_support.h"

namespace banyan::io {
namespace {

namespace fs = std::filesystem;

TEST(Files, AtomicWriteReplacesAndLeavesNothingElse) {
  const TempDirectory folder;
  write_text_atomic(folder / "latest", "1\n");
  write_text_atomic(folder / "latest", "22\n");
  EXPECT_EQ(read_text(folder / "latest"), "22\n");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
}

TEST(Files, FailedWriteKeepsTheOldTextAndNamesTheFile) {
  const TempDirectory folder;
  fs::create_directory(folder / "latest");  // a file cannot be renamed over a folder
  const std::string message = file_error_of([&] { write_text_atomic(folder / "latest", "2"); });
  EXPECT_NE(message.find(folder / "latest"), std::string::npos) << message;
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
  EXPECT_NE(file_error_of([&] { write_text_atomic(folder / "none/latest", "2"); }), "");
}

TEST(Files, ReadRefusesWhatIsNotARegularFile) {
  const TempDirectory folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(file_error_of([&] { read_text(folder / "pipe"); }),
            folder / "pipe" + ": wanted a regular file, got a pipe");
  EXPECT_EQ(file_error_of([&] { read_text("/dev/zero"); }),
            "/dev/zero: wanted a regular file, got a device");
  EXPECT_EQ(file_error_of([&] { read_text(folder.path()); }),
            folder.path() + ": wanted a regular file, got a folder");
  EXPECT_EQ(file_error_of([&] { read_text(folder / "absent"); }),
            folder / "absent" + ": cannot open: No such file or directory");
}

TEST(Files, ReadFollowsLinksToRegularFiles) {
  const TempDirectory folder;
  write_bytes(folder / "blob", "text");
  fs::create_symlink("blob", folder / "link");
  EXPECT_EQ(read_text(folder / "link"), "text");
}

TEST(Files, CommitDirectoryMovesTheWholeTreeOnce) {
  const TempDirectory folder;
  fs::create_directories(folder / "tmp/state");
  write_bytes(folder / "tmp/state/a", "1");
  commit_directory(folder / "tmp", folder / "step_1");
  EXPECT_EQ(read_text(folder / "step_1/state/a"), "1");
  EXPECT_FALSE(fs::exists(folder / "tmp"));

  fs::create_directories(folder / "tmp");
  EXPECT_EQ(file_error_of([&] { commit_directory(folder / "tmp", folder / "step_1"); }),
            folder / "step_1" + ": exists already");
  EXPECT_TRUE(fs::exists(folder / "step_1/state/a"));
  EXPECT_NE(file_error_of([&] { commit_directory(folder / "absent", folder / "step_2"); }), "");
}

}  // namespace
}  // namespace banyan::io
