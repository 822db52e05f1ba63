#include "banyan/io/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>

#include "banyan/io/dtype.h"
#include "banyan/io/safetensors_header.h"
#include "banyan/io/test_support.h"

namespace banyan::io {
namespace {

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0;
}

TEST(Safetensors, EveryTypeComesBackByteForByte) {
  const TempDirectory folder;
  std::vector<NamedTensor> tensors;
  for (const at::ScalarType type : {at::kDouble,
                                    at::kFloat,
                                    at::kHalf,
                                    at::kBFloat16,
                                    at::kLong,
                                    at::kInt,
                                    at::kShort,
                                    at::kChar,
                                    at::kByte,
                                    at::kBool,
                                    at::kFloat8_e4m3fn,
                                    at::kFloat8_e5m2,
                                    at::kFloat8_e8m0fnu,
                                    at::kUInt16,
                                    at::kUInt32,
                                    at::kUInt64,
                                    at::kComplexFloat}) {
    at::Tensor tensor = at::empty({3, 5}, type);
    auto* bytes = static_cast<unsigned char*>(tensor.data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) {
      bytes[i] = static_cast<unsigned char>(type == at::kBool ? i % 2 : i * 37 + 11);
    }
    tensors.push_back({std::string("t.") + find_type(type)->name, tensor});
  }
  tensors.push_back({"empty", at::zeros({0, 4})});
  tensors.push_back({"scalar", at::ones({}, at::kBFloat16)});
  tensors.push_back({"strided", at::arange(12).view({3, 4}).t()});
  write_safetensors(
      folder / "a.safetensors", tensors, {{"format", "pt"}, {"note", "\"quoted\" é"}});

  const SafetensorsFile file(folder / "a.safetensors");
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("note"), "\"quoted\" é");
  for (const NamedTensor& named : tensors) {
    EXPECT_TRUE(same_bytes(file.read(named.name), named.tensor)) << named.name;
  }
  EXPECT_EQ(file_error_of([&] { file.read("absent"); }),
            folder / "a.safetensors" + ": absent: the file holds no such tensor");
}

TEST(Safetensors, HeaderIsSortedCompactAndPadded) {
  const TempDirectory folder;
  write_safetensors(folder / "a",
                    {{"b", at::zeros({2}, at::kByte)}, {"a", at::zeros({1, 2}, at::kHalf)}});
  std::ifstream in(folder / "a", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const std::string header =
      R"({"a":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}})";
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(bytes.substr(8, header.size()), header);
  EXPECT_EQ(bytes.substr(8 + header.size(), length - header.size()).find_first_not_of(' '),
            std::string::npos);
  EXPECT_EQ(bytes.size(), 8 + length + 6);
}

TEST(Safetensors, WriterRefusesWhatTheReaderWould) {
  const TempDirectory folder;
  EXPECT_THROW(write_safetensors(folder / "a", {{"x", at::zeros({1})}, {"x", at::zeros({1})}}),
               std::invalid_argument);
  EXPECT_THROW(write_safetensors(folder / "a", {{"../x", at::zeros({1})}}), std::invalid_argument);
  EXPECT_THROW(write_safetensors(folder / "a", {{"x", at::zeros({1}, at::kComplexDouble)}}),
               std::invalid_argument);
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  write_safetensors(folder / "a", {{"x", at::zeros({1})}});
  EXPECT_EQ(file_error_of([&] { write_safetensors(folder / "a", {{"x", at::ones({1})}}); }),
            folder / "a" + ": cannot create: File exists");
  EXPECT_EQ(SafetensorsFile(folder / "a").read("x").item<float>(), 0.0f);
}

// A file-size limit makes write(2) fail half-way, as a full disk does.
TEST(Safetensors, FailedWriteLeavesNoFile) {
  const TempDirectory folder;
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {4096, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message =
      file_error_of([&] { write_safetensors(folder / "a", {{"x", at::zeros({100000})}}); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(message, folder / "a" + ": cannot write: File too large");
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
}

TEST(Safetensors, FileCutAfterOpeningIsAnError) {
  const TempDirectory folder;
  write_safetensors(folder / "a", {{"x", at::zeros({1000})}});
  const SafetensorsFile file(folder / "a");
  std::filesystem::resize_file(folder / "a", 200);
  EXPECT_NE(file_error_of([&] { file.read("x"); }).find("was cut"), std::string::npos);
}

TEST(Safetensors, SubByteTypesComeAsRawBytes) {
  const auto header = parse_header(
      "f",
      R"({"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]},"b":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[3,6]}})",
      6);
  EXPECT_STREQ(header.entries.at("a").stored, "F4");
  EXPECT_EQ(header.entries.at("b").shape, (std::vector<int64_t>{4}));
}

TEST(Safetensors, OddButValidHeadersLoad) {
  EXPECT_TRUE(parse_header("f", "{}", 0).entries.empty());
  EXPECT_TRUE(parse_header("f", "{}      ", 0).entries.empty());
  EXPECT_EQ(parse_header("f", R"({"__metadata__":{"a":"b"}})", 0).metadata.at("a"), "b");
  const auto header = parse_header(
      "f",
      R"({"e1":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"e2":{"dtype":"F32","shape":[2,0],"data_offsets":[4,4]},)"
      R"("e3":{"dtype":"F32","shape":[0],"data_offsets":[8,8]},"r0":{"shape":[],"data_offsets":[0,4],"dtype":"F32"},)"
      R"("z":{"dtype":"I32","shape":[1,1],"data_offsets":[4,8]}})",
      8);
  EXPECT_EQ(header.entries.size(), 5u);
  EXPECT_TRUE(header.entries.at("r0").shape.empty());
}

TEST(Safetensors, BoolBytesBecomeZeroOrOne) {
  const TempDirectory folder;
  const std::string header = R"({"a":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  write_bytes(folder / "a", bytes + header + std::string("\x00\x01\x07", 3));
  EXPECT_EQ(SafetensorsFile(folder / "a").read("a").sum().item<int64_t>(), 2);
}

}  // namespace
}  // namespace banyan::io
