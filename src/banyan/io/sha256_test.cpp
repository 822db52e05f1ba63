// Examples of FIPS 180-4 (and the empty text), pieces of any size, and both compression functions.
#include "banyan/io/sha256.h"

#include <gtest/gtest.h>

#include <vector>

#include "banyan/io/test_support.h"

namespace banyan::io {
namespace {

std::string hash_of(const std::string& text) {
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex();
}

TEST(Sha256, KnownTexts) {
  EXPECT_EQ(hash_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash_of(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesOfAnySizeGiveTheSameHash) {
  const std::string text(1000, 'x');
  for (size_t piece = 1; piece < 200; piece += 7) {
    Sha256 hash;
    for (size_t at = 0; at < text.size(); at += piece) {
      hash.update(text.data() + at, std::min(piece, text.size() - at));
    }
    EXPECT_EQ(hash.hex(), hash_of(text)) << piece;
  }
}

TEST(Sha256, NativeAndPortableAgree) {
  std::vector<uint8_t> blocks(64 * 9);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(i * 31 + i / 7);
  uint32_t a[8] = {1, 2, 3, 4, 5, 6, 7, 0x80000001};
  uint32_t b[8] = {1, 2, 3, 4, 5, 6, 7, 0x80000001};
  sha256::compress_portable(a, blocks.data(), 9);
  sha256::compress_native()(b, blocks.data(), 9);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(a[i], b[i]);
}

TEST(Sha256, OfAFile) {
  const TempDirectory directory;
  write_bytes(directory / "a", std::string(3 << 20, 'q'));
  const FileHash hash = hash_file(directory / "a");
  EXPECT_EQ(hash.num_bytes, 3u << 20);
  EXPECT_EQ(hash.sha256, hash_of(std::string(3 << 20, 'q')));
  EXPECT_NE(file_error_of([&] { hash_file(directory / "b"); }), "");
}

}  // namespace
}  // namespace banyan::io
