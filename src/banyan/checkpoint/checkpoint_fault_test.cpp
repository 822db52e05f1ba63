// Damage to every file of a checkpoint, and saves that cannot be finished: the previous checkpoint
// is found.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include "banyan/checkpoint/manifest.h"
#include "banyan/checkpoint/test_model.h"
#include "banyan/io/files.h"
#include "banyan/io/json.h"

namespace banyan::checkpoint {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> files_of(const std::string& path) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  }
  return files;
}

// Damages the newest checkpoint file by file; each time the older one must be found and the reason
// named.
template <typename Damage>
void expect_refused_after(const Damage& damage) {
  SmallRun run;
  run.step();
  run.save();
  run.step();
  run.save();
  for (const std::string& file : files_of(run.checkpoint(2))) {
    SCOPED_TRACE(file);
    const std::string whole = io::read_text(file);
    damage(file, whole);
    const std::optional<Found> found = find_latest(run.directory());
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->path, run.checkpoint(1));
    ASSERT_EQ(found->rejected.size(), 1u);
    EXPECT_NE(found->rejected[0].find(run.checkpoint(2)), std::string::npos);
    EXPECT_NE(found->rejected[0].find(fs::path(file).filename().string()), std::string::npos)
        << found->rejected[0];
    EXPECT_NE(io::file_error_of([&] { load(run.checkpoint(2), run.model, run.optimizer); }), "");
    fs::remove(file);
    io::write_bytes(file, whole);
  }
  EXPECT_EQ(find_latest(run.directory())->path, run.checkpoint(2));
}

TEST(CheckpointFaults, OneByteFlipped) {
  expect_refused_after([](const std::string& file, std::string bytes) {
    // In the manifest a digit of the step count, so that it stays good JSON; elsewhere the last
    // byte but one.
    const bool manifest = file.ends_with("manifest.json");
    const size_t at = manifest ? bytes.find("optimizer_steps") + 18 : bytes.size() - 2;
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    io::write_bytes(file, bytes);
  });
}

TEST(CheckpointFaults, Truncated) {
  expect_refused_after([](const std::string& file, const std::string& bytes) {
    io::write_bytes(file, bytes.substr(0, bytes.size() / 2));
  });
}

TEST(CheckpointFaults, Zeroed) {
  expect_refused_after([](const std::string& file, const std::string& bytes) {
    io::write_bytes(file, std::string(bytes.size(), '\0'));
  });
}

TEST(CheckpointFaults, Missing) {
  expect_refused_after([](const std::string& file, const std::string&) { fs::remove(file); });
}

TEST(CheckpointFaults, LinkInsteadOfAFile) {
  expect_refused_after([](const std::string& file, const std::string& bytes) {
    const std::string elsewhere =
        fs::path(file).parent_path().parent_path().parent_path().string() + "/elsewhere-" +
        fs::path(file).filename().string();
    // The manifest itself may be a link; what it says then has to be wrong to be refused.
    io::write_bytes(elsewhere, file.ends_with("manifest.json") ? "{}" : bytes);
    fs::remove(file);
    fs::create_symlink(elsewhere, file);
  });
}

TEST(CheckpointFaults, NamesThatLeaveTheFolderAreRefused) {
  SmallRun run;
  run.step();
  run.save();
  const std::string manifest = run.checkpoint(1) + "/" + kManifestFile;
  const io::Json json = io::parse_json(io::read_text(manifest), manifest);
  for (const std::string name :
       {"../escape", "/etc/hostname", "state/../../x", "./config.json", ""}) {
    io::Json changed = json;
    changed["files"][name] = changed["files"]["config.json"];
    changed.erase("sha256");
    const std::string text = changed.dump();
    io::Sha256 seal;
    seal.update(text.data(), text.size());
    changed["sha256"] = seal.hex();
    io::write_bytes(manifest, changed.dump());
    const std::string message = io::file_error_of([&] { read_manifest(run.checkpoint(1)); });
    EXPECT_NE(message.find("leaves the folder"), std::string::npos) << name << ": " << message;
  }
}

TEST(CheckpointFaults, NothingTrustworthyIsAnErrorNotAFreshStart) {
  SmallRun run;
  run.step();
  run.save();
  fs::resize_file(run.checkpoint(1) + "/model.safetensors", 3);
  const std::string message = io::file_error_of([&] { find_latest(run.directory()); });
  EXPECT_NE(message.find("model.safetensors: size: wanted"), std::string::npos) << message;
}

TEST(CheckpointFaults, LeftoversOfAKilledSaveAreIgnoredAndRemoved) {
  SmallRun run;
  run.step();
  run.save();
  const std::string leftover = run.directory() + "/.tmp-global_step_2-12345";
  fs::copy(run.checkpoint(1), leftover, fs::copy_options::recursive);
  EXPECT_EQ(find_latest(run.directory())->path, run.checkpoint(1));
  run.step();
  run.save();
  EXPECT_FALSE(fs::exists(leftover));
  EXPECT_EQ(find_latest(run.directory())->path, run.checkpoint(2));
}

// A full disk, at every size where a write can fail: files may not grow beyond `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST(CheckpointFaults, AFullDiskLeavesThePreviousOneAndNoHalf) {
  SmallRun run;
  run.step();
  run.save();
  run.step();
  for (const rlim_t bytes : {0, 1, 20, 60, 500, 1000, 1500, 2000, 3000}) {
    SCOPED_TRACE(bytes);
    std::string message;
    {
      const FileSizeLimit limit(bytes);
      message = io::file_error_of([&] { run.save(/*max_to_keep=*/1); });
    }
    EXPECT_NE(message, "");
    EXPECT_FALSE(fs::exists(run.checkpoint(2)));
    EXPECT_EQ(std::distance(fs::directory_iterator(run.directory()), {}), 2);
    EXPECT_EQ(find_latest(run.directory())->path, run.checkpoint(1));
  }
  run.save(/*max_to_keep=*/1);
  EXPECT_EQ(find_latest(run.directory())->path, run.checkpoint(2));
  EXPECT_FALSE(fs::exists(run.checkpoint(1)));
}

}  // namespace
}  // namespace banyan::checkpoint
