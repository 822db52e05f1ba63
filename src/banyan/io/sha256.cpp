// The compression function twice: as FIPS 180-4 writes it, and on the x86 SHA instructions, which
// hold the eight state words as ABEF and CDGH and run two rounds at a time.
#include "banyan/io/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "banyan/io/posix_file.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace banyan::io {
namespace {

constexpr size_t kBlock = 64;

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

#if defined(__x86_64__)
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha(uint32_t* state,
                                                              const uint8_t* blocks,
                                                              size_t num_blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  auto* words = reinterpret_cast<__m128i*>(state);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
  for (; num_blocks > 0; --num_blocks, blocks += kBlock) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m128i& now = w[i % 4];
      if (i < 4) {
        const auto* bytes = reinterpret_cast<const __m128i*>(blocks) + i;
        now = _mm_shuffle_epi8(_mm_loadu_si128(bytes), swap);
      } else {
        const __m128i last = w[(i + 3) % 4];
        const __m128i seven_ago = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
        now = _mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) % 4]), seven_ago);
        now = _mm_sha256msg2_epu32(now, last);
      }
      const auto* constants = reinterpret_cast<const __m128i*>(kRound) + i;
      const __m128i added = _mm_add_epi32(now, _mm_load_si128(constants));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}
#endif

}  // namespace

namespace sha256 {

void compress_portable(uint32_t* state, const uint8_t* blocks, size_t num_blocks) {
  for (; num_blocks > 0; --num_blocks, blocks += kBlock) {
    uint32_t w[64];
    for (int t = 0; t < 16; ++t) w[t] = load_big_endian(blocks + 4 * t);
    for (int t = 16; t < 64; ++t) {
      const uint32_t x = w[t - 15];
      const uint32_t y = w[t - 2];
      const uint32_t s0 = std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3);
      const uint32_t s1 = std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = std::to_array(
        {state[0], state[1], state[2], state[3], state[4], state[5], state[6], state[7]});
    for (int t = 0; t < 64; ++t) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t first = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t second = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    const uint32_t add[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += add[i];
  }
}

Compress compress_native() {
#if defined(__x86_64__)
  static const Compress best = has_sha_instructions() ? compress_sha : compress_portable;
  return best;
#else
  return compress_portable;
#endif
}

}  // namespace sha256

void Sha256::update(const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t held = num_bytes_ % kBlock;
  num_bytes_ += num_bytes;
  if (held > 0) {
    const size_t taken = std::min(num_bytes, kBlock - held);
    std::memcpy(tail_.data() + held, bytes, taken);
    if (held + taken < kBlock) return;
    sha256::compress_native()(state_.data(), tail_.data(), 1);
    bytes += taken;
    num_bytes -= taken;
  }
  sha256::compress_native()(state_.data(), bytes, num_bytes / kBlock);
  std::memcpy(tail_.data(), bytes + num_bytes / kBlock * kBlock, num_bytes % kBlock);
}

std::string Sha256::hex() {
  const uint64_t num_bits = num_bytes_ * 8;
  std::vector<uint8_t> padding = {0x80};
  while ((num_bytes_ + padding.size()) % kBlock != kBlock - 8) padding.push_back(0);
  for (int shift = 56; shift >= 0; shift -= 8) {
    padding.push_back(static_cast<uint8_t>(num_bits >> shift));
  }
  update(padding.data(), padding.size());
  std::string text;
  for (const uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  }
  return text;
}

FileHash hash_file(const std::string& path) {
  FileHash out;
  const FileDescriptor file = open_regular(path, &out.num_bytes);
  Sha256 hash;
  std::vector<uint8_t> buffer(size_t{1} << 20);
  for (uint64_t done = 0; done < out.num_bytes;) {
    const size_t part = std::min<uint64_t>(buffer.size(), out.num_bytes - done);
    read_exactly(file.get(), path, done, buffer.data(), part);
    hash.update(buffer.data(), part);
    done += part;
  }
  out.sha256 = hash.hex();
  return out;
}

}  // namespace banyan::io
