// Every malformed file of the reliability specification (section 4) is refused, with a message of
// its own.
#include <sys/stat.h>

#include <chrono>
#include <cstring>
#include <set>

#include "banyan/io/safetensors.h"
#include "banyan/io/safetensors_header.h"
#include "banyan/io/test_support.h"

namespace banyan::io {
namespace {

using namespace std::string_literals;

std::string with_length(uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

// A whole file: length, header, `num_data` zero bytes.
std::string file_of(const std::string& header, size_t num_data = 0) {
  return with_length(header.size(), header + std::string(num_data, '\0'));
}

std::string repeat(const std::string& text, size_t times) {
  std::string out;
  for (size_t i = 0; i < times; ++i) out += text;
  return out;
}

// One tensor "t" of four bytes with its three fields replaced.
std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"t":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

std::string u8(const std::string& name, int begin, int end) {
  return '"' + name + R"(":{"dtype":"U8","shape":[)" + std::to_string(end - begin) +
         R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(end) + "]}";
}

struct Case {
  const char* label;
  std::string bytes;
  const char* reason;  // must stand in the message
};

void expect_refused(const std::vector<Case>& cases) {
  const TempDirectory folder;
  const std::string path = folder / "model.safetensors";
  for (const Case& bad : cases) {
    write_bytes(path, bad.bytes);
    const std::string message = file_error_of([&] { SafetensorsFile file(path); });
    EXPECT_EQ(message.rfind(path + ": ", 0), 0u) << bad.label << ": " << message;
    EXPECT_NE(message.find(bad.reason), std::string::npos) << bad.label << ": " << message;
    EXPECT_LT(message.size(), path.size() + 400) << bad.label;
    for (const char c : message) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << bad.label << ": " << message;
  }
}

TEST(SafetensorsMalformed, LengthField) {
  expect_refused({
      {"empty file", "", "the file has 0 bytes, wanted at least 8"},
      {"seven bytes", "1234567", "the file has 7 bytes"},
      {"length 0", with_length(0, "{}"), "header length: is 0"},
      {"beyond the file", with_length(100, "{}"), "is beyond the 2 bytes"},
      {"adding 8 wraps", with_length(~uint64_t{0} - 3, "{}"), "is over the limit"},
      {"above the cap",
       with_length(kMaxHeaderBytes + 1, "{}"),
       "16777217 is over the limit of 16777216"},
  });
}

TEST(SafetensorsMalformed, Text) {
  expect_refused({
      {"not UTF-8", file_of("{\"\xff\":{}}"), "ill-formed UTF-8"},
      {"lone surrogate", file_of(R"({"\ud800":{}})"), "surrogate"},
      {"not JSON", file_of("{what}"), "not JSON"},
      {"truncated", file_of(R"({"t":{"dtype":"U8")"), "unexpected end of input"},
      {"array", file_of("[]"), "must start with '{'"},
      {"string", file_of("\"a\""), "must start with '{'"},
      {"null", file_of("null"), "must start with '{'"},
      {"leading space", file_of(" {}"), "must start with '{'"},
      {"byte order mark", file_of("\xef\xbb\xbf{}"), "must start with '{'"},
      {"deep lists",
       file_of(R"({"t":{"shape":)" + repeat("[", 100000)),
       "shape: wanted integers >= 0, got a list"},
      {"deep objects", file_of(repeat("{\"a\":", 100000)), "unknown field 'a'"},
      {"newline padding", file_of("{}\n"), "padded by something other than spaces"},
      {"tab padding", file_of("{} \t"), "padded by something other than spaces"},
      {"NUL padding", file_of(std::string("{}\0", 3)), "NUL at byte 2"},
      {"NUL hides garbage", file_of(std::string("{}\0x ", 5)), "NUL at byte 2"},
      {"trailing garbage", file_of("{} x"), "expected end of input"},
      {"two values", file_of("{}{}"), "expected end of input"},
  });
}

TEST(SafetensorsMalformed, Duplicates) {
  expect_refused({
      {"tensor, same range",
       file_of("{" + u8("t", 0, 4) + "," + u8("t", 0, 4) + "}", 4),
       "the tensor stands twice"},
      {"tensor, other range",
       file_of("{" + u8("t", 0, 4) + "," + u8("t", 4, 8) + "}", 8),
       "the tensor stands twice"},
      {"dtype",
       file_of(R"({"t":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
       "field 'dtype' stands twice"},
      {"shape",
       file_of(R"({"t":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}})"),
       "field 'shape' stands twice"},
      {"offsets",
       file_of(R"({"t":{"data_offsets":[0,0],"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
       "field 'data_offsets' stands twice"},
      {"metadata",
       file_of(R"({"__metadata__":{},"__metadata__":{}})"),
       "'__metadata__': stands twice"},
      {"metadata key",
       file_of(R"({"__metadata__":{"a":"1","a":"1"}})"),
       "metadata: the key stands twice"},
  });
}

TEST(SafetensorsMalformed, MetadataAndNames) {
  expect_refused({
      {"value is a number",
       file_of(R"({"__metadata__":{"a":1}})"),
       "metadata: wanted a string, got the number 1"},
      {"value is an object",
       file_of(R"({"__metadata__":{"a":{}}})"),
       "metadata: wanted a string, got an object"},
      {"not an object", file_of(R"({"__metadata__":[]})"), "wanted an object, got a list"},
      {"null", file_of(R"({"__metadata__":null})"), "wanted an object, got null"},
      {"empty name", file_of("{" + u8("", 0, 0) + "}"), "must not be empty"},
      {"slash", file_of("{" + u8("a/b", 0, 0) + "}"), "must not contain '/'"},
      {"dots", file_of("{" + u8("..", 0, 0) + "}"), "must not be a relative path"},
      {"NUL", file_of("{" + u8("a\\u0000b", 0, 0) + "}"), "must not contain control characters"},
      {"1 MB", file_of("{" + u8(std::string(1 << 20, 'a'), 0, 0) + "}"), "at most 1024 bytes"},
  });
}

TEST(SafetensorsMalformed, Fields) {
  expect_refused({
      {"no dtype", file_of(R"({"t":{"shape":[0],"data_offsets":[0,0]}})"), "dtype is missing"},
      {"no shape", file_of(R"({"t":{"dtype":"U8","data_offsets":[0,0]}})"), "shape is missing"},
      {"no offsets", file_of(R"({"t":{"dtype":"U8","shape":[0]}})"), "data_offsets is missing"},
      {"extra field",
       file_of(R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}})"),
       "unknown field 'x'"},
      {"entry null", file_of(R"({"t":null})"), "'t': wanted an object, got null"},
      {"entry list", file_of(R"({"t":[]})"), "'t': wanted an object, got a list"},
      {"unknown dtype",
       file_of(tensor("\"F128\"", "[0]", "[0,0]")),
       "the format has no type 'F128'"},
      {"lower case", file_of(tensor("\"f32\"", "[0]", "[0,0]")), "the format has no type 'f32'"},
      {"number as dtype",
       file_of(tensor("32", "[0]", "[0,0]")),
       "dtype: wanted a string, got the number 32"},
      {"sub-byte", file_of(tensor("\"F4\"", "[3]", "[0,2]"), 2), "12 bits do not fill whole bytes"},
  });
}

TEST(SafetensorsMalformed, Shape) {
  const std::string two62 = "4611686018427387904", two63 = "9223372036854775808";
  expect_refused({
      {"negative",
       file_of(tensor("\"U8\"", "[-1]", "[0,0]")),
       "shape: wanted integers >= 0, got the number -1"},
      {"fraction", file_of(tensor("\"U8\"", "[1.5]", "[0,1]"), 1), "got the number 1.5"},
      {"2.0", file_of(tensor("\"U8\"", "[2.0]", "[0,2]"), 2), "got the number 2.0"},
      {"1e30", file_of(tensor("\"U8\"", "[1e30]", "[0,0]")), "got the number 1e30"},
      {"30 digits",
       file_of(tensor("\"U8\"", "[" + std::string(30, '9') + "]", "[0,0]")),
       "wanted integers >= 0"},
      {"string",
       file_of(tensor("\"U8\"", "[\"1\"]", "[0,1]"), 1),
       "shape: wanted integers >= 0, got a string"},
      {"not a list",
       file_of(tensor("\"U8\"", "4", "[0,4]"), 4),
       "shape: wanted a list, got the number 4"},
      {"65 dimensions",
       file_of(tensor("\"U8\"", "[1" + repeat(",1", 64) + "]", "[0,1]"), 1),
       "over 64 dimensions"},
      {"100k dimensions",
       file_of(tensor("\"U8\"", "[1" + repeat(",1", 99999) + "]", "[0,1]"), 1),
       "over 64 dimensions"},
      {"product", file_of(tensor("\"U8\"", "[" + two62 + ",4]", "[0,0]")), "overflows"},
      {"2^63",
       file_of(tensor("\"U8\"", "[0," + two63 + "," + two63 + "]", "[0,0]")),
       "is over 2^63 - 1"},
      {"behind a zero",
       file_of(tensor("\"U8\"", "[0," + two62 + "," + two62 + "]", "[0,0]")),
       "overflows"},
      {"product times bits", file_of(tensor("\"F64\"", "[" + two62 + "]", "[0,0]")), "overflows"},
  });
}

TEST(SafetensorsMalformed, Offsets) {
  expect_refused({
      {"reversed", file_of(tensor("\"U8\"", "[4]", "[4,0]"), 4), "4 is after 0"},
      {"negative",
       file_of(tensor("\"U8\"", "[4]", "[-4,0]"), 4),
       "data_offsets: wanted integers >= 0, got the number -4"},
      {"beyond the file",
       file_of(tensor("\"U8\"", "[8]", "[0,8]"), 4),
       "end 8 is beyond the 4 bytes"},
      {"float", file_of(tensor("\"U8\"", "[4]", "[0,4.0]"), 4), "got the number 4.0"},
      {"one item", file_of(tensor("\"U8\"", "[4]", "[4]"), 4), "wanted 2 integers, got 1"},
      {"three items",
       file_of(tensor("\"U8\"", "[4]", "[0,4,4]"), 4),
       "wanted 2 integers, got more"},
      {"size", file_of(tensor("\"F32\"", "[2]", "[0,4]"), 4), "take 8 bytes, data_offsets give 4"},
  });
}

TEST(SafetensorsMalformed, Coverage) {
  expect_refused({
      {"overlap",
       file_of("{" + u8("a", 0, 4) + "," + u8("b", 2, 6) + "}", 6),
       "'b': data_offsets: begin at 2 overlap"},
      {"identical",
       file_of("{" + u8("a", 0, 4) + "," + u8("b", 0, 4) + "}", 4),
       "overlap the data up to 4"},
      {"hole",
       file_of("{" + u8("a", 0, 2) + "," + u8("b", 3, 6) + "}", 6),
       "begin at 3 leave a hole after 2"},
      {"not from 0", file_of("{" + u8("a", 2, 4) + "}", 4), "begin at 2 leave a hole after 0"},
      {"file longer",
       file_of("{" + u8("a", 0, 4) + "}", 5),
       "tensors end at byte 4, the file holds 5"},
      {"file shorter", file_of("{" + u8("a", 0, 4) + "}", 3), "end 4 is beyond the 3 bytes"},
      {"data without tensors", file_of("{}", 3), "tensors end at byte 0"},
      {"empty inside another",
       file_of("{" + u8("a", 0, 4) + "," + u8("b", 2, 2) + "}", 4),
       "'b': data_offsets: begin at 2 overlap"},
  });
}

TEST(SafetensorsMalformed, NotAFile) {
  const TempDirectory folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_NE(file_error_of([&] { SafetensorsFile file(folder / "pipe"); }).find("got a pipe"),
            std::string::npos);
  EXPECT_NE(file_error_of([&] { SafetensorsFile file("/dev/zero"); }).find("got a device"),
            std::string::npos);
}

// Random damage to good headers: each is refused with a FileError or tiles its data exactly.
TEST(SafetensorsMalformed, DamagedHeadersAreRefusedOrWhole) {
  const std::string good =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"F4","shape":[4],"data_offsets":[24,26]},"c":{"dtype":"U8","shape":[0,9],"data_offsets":[26,26]}})";
  constexpr uint64_t kDataBytes = 26;
  const std::vector<std::string> pieces = {"{",
                                           "}",
                                           "[",
                                           "]",
                                           ",",
                                           ":",
                                           "\"",
                                           "0",
                                           "-1",
                                           " ",
                                           "\n",
                                           "\xff",
                                           "\\u0000",
                                           "null",
                                           "1e9",
                                           "2.0",
                                           "F64",
                                           "..",
                                           "\0"s,
                                           "\t",
                                           "9223372036854775808",
                                           "\"shape\":[],",
                                           "\\ud800",
                                           "\x80"};
  uint64_t state = 1;
  const auto draw = [&](size_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>(state >> 33) % below;
  };
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = good;
    for (size_t edits = draw(4); edits > 0; --edits) {
      const size_t place = draw(text.size() + 1);
      switch (draw(3)) {
        case 0:
          text.insert(place, pieces[draw(pieces.size())]);
          break;
        case 1:
          text.erase(place, 1 + draw(3));
          break;
        default:
          if (place < text.size()) text[place] = static_cast<char>(draw(256));
      }
    }
    try {
      uint64_t covered = 0;
      for (const auto& [name, entry] : parse_header("f", text, kDataBytes).entries) {
        covered += entry.end - entry.begin;
      }
      EXPECT_EQ(covered, kDataBytes) << text;
      ++accepted;
    } catch (const FileError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("f: ", 0), 0u);
    }
  }
  EXPECT_GT(accepted, 5000);
  EXPECT_LT(accepted, 10000);
}

TEST(SafetensorsMalformed, AHeaderFullOfTinyTensorsTakesBoundedTime) {
  std::string header = "{";
  int count = 0;
  while (header.size() < kMaxHeaderBytes - 200) {
    header += (count ? "," : "") + u8(std::to_string(count), count, count + 1);
    ++count;
  }
  header += "}";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse_header("f", header, static_cast<uint64_t>(count)).entries.size(),
            static_cast<size_t>(count));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace banyan::io
