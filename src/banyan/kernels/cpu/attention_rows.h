// A few rows against one tile, scores, softmax and values in registers, on processors with
// avx512_bf16: what the separate steps of attention.cpp compute (tile_gemm, softmax_tile,
// merge_tile), bit for bit.
#pragma once

#include <cstdint>

namespace banyan::kernels {

// True where attend_rows can be used: avx512_bf16 is the kernel of gemm.h, and head_dim is a
// multiple of 16.
bool attend_rows_available(int64_t head_dim);

struct AttendRows {
  int64_t rows = 0;
  int64_t head_dim = 0;
  const uint16_t* q = nullptr;     // [rows, D]
  const uint16_t* tile = nullptr;  // keys and values (attention_tile.h)
  const int32_t* valid = nullptr;  // [rows]: columns seen, 1..64
  float scale = 1.0f;
  float* out = nullptr;  // [rows, D]: O so far
  float* max = nullptr;  // [rows]: m so far
  float* sum = nullptr;  // [rows]: l so far
  // The tile that is wanted next: fetched into the second-level cache meanwhile; null: nothing.
  const uint16_t* next = nullptr;
};

// One step of the online softmax for all rows. One thread.
void attend_rows(const AttendRows& work);

}  // namespace banyan::kernels
