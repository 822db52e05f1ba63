// SHA-256 (FIPS 180-4), to tell whether a file is the one that was written. Uses the processor's
// SHA instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace banyan::io {

class Sha256 {
 public:
  void update(const void* data, size_t num_bytes);
  std::string hex();  // 64 lower-case digits; ends the hash

 private:
  std::array<uint32_t, 8> state_ = {0x6a09e667,
                                    0xbb67ae85,
                                    0x3c6ef372,
                                    0xa54ff53a,
                                    0x510e527f,
                                    0x9b05688c,
                                    0x1f83d9ab,
                                    0x5be0cd19};
  std::array<uint8_t, 64> tail_{};  // bytes of the block that is not full yet
  uint64_t num_bytes_ = 0;
};

struct FileHash {
  uint64_t num_bytes = 0;
  std::string sha256;
};

// Of a regular file; throws FileError.
FileHash hash_file(const std::string& path);

namespace sha256 {
// One compression function per instruction set, for the test that compares them.
void compress_portable(uint32_t* state, const uint8_t* blocks, size_t num_blocks);
using Compress = void (*)(uint32_t* state, const uint8_t* blocks, size_t num_blocks);
Compress compress_native();  // compress_portable where the processor has no SHA instructions
}  // namespace sha256

}  // namespace banyan::io
