// The product of a few rows of bf16 with packed columns, in one register tile after another, on
// processors with avx512_bf16: what brgemm computes, bit for bit, for any number of rows, and with
// the memory that is wanted next fetched meanwhile.
//
// An output element is one chain of dpbf16 over the pairs of the depth in ascending order, from
// zero; c is added at the end. Tiles of up to 6 rows x 64 columns stand in registers; the columns
// of B come from the second-level cache, so a tile of rows costs one reading of the panel.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "banyan/kernels/cpu/fetch_queue.h"

namespace banyan::kernels {

// True on a processor with avx512_bf16 (the build always has the code on x86-64).
bool bf16_product_available();

struct Bf16Product {
  const c10::BFloat16* a = nullptr;  // [rows, depth], row stride lda; even depth
  int64_t lda = 0;
  int64_t rows = 0;
  const c10::BFloat16* b = nullptr;  // [depth / 2][ldb][2]
  int64_t ldb = 0;
  int64_t depth = 0;
  int64_t columns = 0;  // of b, any number up to ldb
  bool add = false;     // c += a b, else c = a b
  float* c = nullptr;   // [rows, columns], row stride ldc
  int64_t ldc = 0;
  // Fetched into the second-level cache while multiplying, evenly; null: nothing.
  const void* ahead = nullptr;
  int64_t ahead_bytes = 0;
  FetchQueue* then = nullptr;  // fetched behind it, as far as the product lasts; or null
};

// One thread. Only where bf16_product_available().
void bf16_product(const Bf16Product& product);

}  // namespace banyan::kernels
