// All blocks of a decoder over the rows of one pass of the rollout, bf16, in one team of threads
// (team.h): embedding, then per layer
//   qkv = N1(x) Wᵀ;  q, k = rope(norm(...)), k and v into their pages;  attention over the pages
//   x += attention Woᵀ;  a = silu(g) u, [g u] = N1(x) Wguᵀ;  x += a Wdᵀ
// and the final norm of the rows that are wanted. Each line is a phase or two with a barrier behind
// it. Every value is what the operators of training compute (nn/attention.h, nn/mlp.h), bit for
// bit: the same products, the same roundings, and rows do not know of one another.
//
// Products: one item is a panel of columns for a group of rows; the panels that are left over after
// an equal share for each member are cut in two. While an item is computed, the next one's panel is
// fetched, across the end of the phase too, so that with many rows the weights arrive behind the
// arithmetic and with few rows the stream does not break off at barriers.
#pragma once

#include <cstdint>
#include <vector>

#include "banyan/kernels/cpu/attention.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/kernels/cpu/scratch.h"
#include "banyan/kernels/cpu/team.h"

namespace banyan::kernels {

struct PassProduct {
  Panels weight;
  const BFloat16* bias = nullptr;  // [columns] or null
};

// Weights of one layer and its pages. Borrowed; a fused projection is one matrix.
struct PassLayer {
  const uint16_t* input_norm = nullptr;  // [E]
  PassProduct qkv;                       // columns (H + 2 K) D: q, k, v
  const uint16_t* q_norm = nullptr;      // [D] or null
  const uint16_t* k_norm = nullptr;
  PassProduct out;
  const uint16_t* post_norm = nullptr;  // [E]
  PassProduct gate_up;                  // columns 2 F: gate, up
  PassProduct down;
  uint16_t* tiles = nullptr;  // [pages, K, tile_elements(D)]
};

struct PassModel {
  AttentionShape attention;
  int64_t hidden = 0;        // E
  int64_t intermediate = 0;  // F
  float norm_eps = 0.0f;
  Panels embedding;                      // of W, or of Wᵀ if embedding_transposed
  bool embedding_transposed = false;     // a row of W lies in fewer cache lines
  const uint16_t* final_norm = nullptr;  // [E]
  const float* cos = nullptr;            // [P, D / 2]
  const float* sin = nullptr;
  std::vector<PassLayer> layers;
};

// Tokens [first, first + count) stand at consecutive positions of one page and are written to it in
// order.
struct PageWrite {
  int32_t first = 0;
  int32_t count = 0;
};

struct PassRows {
  int64_t num_tokens = 0;
  const int32_t* ids = nullptr;           // [T]
  const int32_t* positions = nullptr;     // [T], inside the tables and the pages
  const int32_t* const* pages = nullptr;  // [T]: per token the pages of its path
  const int32_t* visible = nullptr;       // [T]: its position + 1
  const int32_t* runs = nullptr;          // [T] or null: see AttendInput::runs
  const PageWrite* writes = nullptr;      // all tokens, in order
  int64_t num_writes = 0;
  const int32_t* wanted = nullptr;  // [num_wanted] tokens whose hidden rows are returned
  int64_t num_wanted = 0;
};

// Working memory, kept from pass to pass: nothing is allocated once the largest pass has been seen.
class PassWorkspace {
 public:
  // Room for a pass.
  void reserve(const PassModel& model, const PassRows& rows);
  // Before each pass.
  void start() {
    for (Tickets& tickets : tickets_) tickets.reset();
  }

 private:
  friend class PassRun;
  int64_t rows_ = 0;  // reserved
  const PassModel* model_ = nullptr;
  Scratch memory_;
  Scratch attention_;         // of all members
  int64_t member_bytes_ = 0;  // of each
  std::vector<Tickets> tickets_;
  std::vector<FetchQueue> pages_;  // of each member: the pages that it will attend
  struct Buffers {
    uint16_t* x = nullptr;         // [T, E]: the residual stream
    uint16_t* h = nullptr;         // [T, E even]: output of a norm
    uint16_t* qkv = nullptr;       // [T, (H + 2 K) D]
    uint16_t* q = nullptr;         // [T, H D]: after norm and RoPE
    uint16_t* attended = nullptr;  // [T, H D]
    uint16_t* gate_up = nullptr;   // [T, 2 F]; only where the columns of gate and up share a panel
    uint16_t* act = nullptr;       // [T, F even]
  } at_;
};

// hidden [num_wanted, E] bf16.
void decoder_pass(const PassModel& model,
                  const PassRows& rows,
                  PassWorkspace& workspace,
                  uint16_t* hidden);

}  // namespace banyan::kernels
