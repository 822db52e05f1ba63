#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "banyan/io/safetensors.h"
#include "banyan/io/test_support.h"

namespace banyan::io {
namespace {

namespace fs = std::filesystem;

void write_index(const TempDirectory& folder,
                 const std::string& weight_map,
                 const std::string& total = "") {
  write_bytes(folder / "model.safetensors.index.json",
              "{" + (total.empty() ? "" : R"("metadata":{"total_size":)" + total + "},") +
                  R"("weight_map":)" + weight_map + "}");
}

// Two shards of one tensor each, 12 bytes in all.
void write_two(const TempDirectory& folder) {
  write_safetensors(folder / "s1.safetensors", {{"a", at::ones({2})}});
  write_safetensors(folder / "s2.safetensors", {{"b", at::ones({1})}});
}

std::string error_of(const TempDirectory& folder) {
  return file_error_of([&] { HfWeights weights(folder.path()); });
}

TEST(HfWeights, OneFileAndShardsReadAlike) {
  std::vector<NamedTensor> tensors;
  for (int i = 9; i >= 0; --i)
    tensors.push_back({"t" + std::to_string(i), at::arange(i, i + 6, at::kFloat).view({2, 3})});
  for (const uint64_t limit : {uint64_t{1} << 30, uint64_t{50}, uint64_t{1}}) {
    const TempDirectory folder;
    write_hf_weights(folder.path(), tensors, limit);
    EXPECT_EQ(fs::exists(folder / "model.safetensors"), limit > 1000);
    EXPECT_EQ(fs::exists(folder / "model-00001-of-00005.safetensors"), limit == 50);
    const HfWeights weights(folder.path());
    EXPECT_EQ(weights.names().size(), 10u);
    for (const NamedTensor& named : tensors)
      EXPECT_TRUE(weights.read(named.name, {2, 3}).equal(named.tensor));
  }
}

TEST(HfWeights, ReadNamesFileTensorAndShapes) {
  const TempDirectory folder;
  write_hf_weights(folder.path(), {{"a", at::zeros({2, 3})}});
  const HfWeights weights(folder.path());
  EXPECT_TRUE(weights.contains("a"));
  EXPECT_EQ(weights.entry("a").dtype, at::kFloat);
  EXPECT_EQ(file_error_of([&] { weights.read("a", {3, 2}); }),
            folder / "model.safetensors" + ": a: wanted shape [3, 2], got [2, 3]");
  EXPECT_EQ(file_error_of([&] { weights.read("b", {1}); }),
            folder.path() + ": b: no file holds this tensor");
}

TEST(HfWeights, NoWeights) {
  const TempDirectory folder;
  EXPECT_NE(error_of(folder).find("holds neither model.safetensors nor"), std::string::npos);
}

TEST(HfWeights, LinksToRegularFilesAreFine) {
  const TempDirectory folder;
  fs::create_directories(folder / "blobs");
  write_safetensors(folder / "blobs/1", {{"a", at::ones({2})}});
  fs::create_directories(folder / "snapshot");
  fs::create_symlink("../blobs/1", folder / "snapshot/model.safetensors");
  EXPECT_TRUE(HfWeights(folder / "snapshot").contains("a"));
}

TEST(HfWeights, BadIndexes) {
  const TempDirectory folder;
  write_two(folder);
  const auto expect = [&](const std::string& map, const std::string& total, const char* reason) {
    write_index(folder, map, total);
    const std::string message = error_of(folder);
    EXPECT_NE(message.find(reason), std::string::npos) << map << ": " << message;
  };
  expect(
      R"({"a":"s1.safetensors","b":"s2.safetensors"})", "11", "says 11 bytes, the shards hold 12");
  expect(R"({"a":"s1.safetensors","b":"s2.safetensors"})",
         "\"12\"",
         "metadata.total_size: wanted bytes");
  expect(R"({"a":"s1.safetensors","b":"s3.safetensors"})", "", "s3.safetensors: shard is missing");
  expect(R"({"a":"s1.safetensors","b":"s1.safetensors"})", "", "b: is missing from its shard");
  expect(R"({"a":"s2.safetensors","b":"s2.safetensors"})", "", "a: is missing from its shard");
  expect(R"({"b":"s1.safetensors","x":"s2.safetensors"})", "", "a: the index does not list it");
  expect(R"({"a":"s1.safetensors","a":"s1.safetensors"})", "", "key 'a' stands twice");
  expect(R"({"a":7})", "", "a: wanted a shard name");
  expect("[]", "", "weight_map: wanted an object");
  expect("{}", "", "weight_map: names no tensor");
  for (const char* name : {"../s1.safetensors",
                           "/etc/s1.safetensors",
                           "sub/s1.safetensors",
                           "..",
                           "",
                           "s1.bin",
                           "s1\\u0000.safetensors"}) {
    expect(std::string(R"({"a":")") + name + R"(","b":"s2.safetensors"})",
           "",
           "is not a plain file name of this folder");
  }
  write_safetensors(folder / "s3.safetensors", {{"a", at::ones({2})}, {"b", at::ones({1})}});
  expect(R"({"a":"s1.safetensors","b":"s3.safetensors"})", "", "a: stands in ");
  write_bytes(folder / "model.safetensors.index.json", std::string(100000, '['));
  EXPECT_NE(error_of(folder).find("nested deeper than 64"), std::string::npos);
  write_index(folder, R"({"a":"s1.safetensors","b":"s2.safetensors"})", "12");
  EXPECT_EQ(error_of(folder), "");
}

}  // namespace
}  // namespace banyan::io
