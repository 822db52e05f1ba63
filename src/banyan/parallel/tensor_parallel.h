// A decoder cut over ranks that work on the same tokens (Shoeybi et al., "Megatron-LM", 2019;
// specification parallel 3 and 4). What a rank holds, by HF name:
//   q_proj                    rows of its query heads        o_proj      the columns of these heads
//   k_proj, v_proj            rows of its kv heads           down_proj   columns of its run of F
//   gate_proj, up_proj        rows of its run of F           embed_tokens, lm_head   rows of its
//   tokens; norms, biases of o and down, a value head, routers: all of it, equal on every rank
// Of experts likewise, with the runs of their own F: every rank has a part of each expert.
//
// Whole kv heads are dealt out as evenly as may be, with the query heads that read them. Where
// there are fewer kv heads than ranks, n ranks hold the same kv head and share its query heads: its
// gradients are added over them. Runs of F and of the vocabulary differ by one at most.
//
// A product with rows (q, k, v, gate, up) needs all of its input and gives a part of its output;
// one with columns (o, down) gives a term of its output, and the terms are added in rank order:
// sum_rows. Backward it is the other way round. Without sequence parallel all rows of the residual
// stream are on every rank. With it a rank holds a run of ceil(T / n) rows of it (the last are
// padding), so that norms and what is kept of them shrink by n: sum_rows gives a rank its rows of
// the sum alone, and gather_rows brings them together (Korthikanti et al., "Reducing activation
// recomputation in large transformer models", 2022). Norm weights then have a part of their
// gradient on each rank, as q_norm and k_norm always have: finish() adds them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "banyan/core/param.h"
#include "banyan/parallel/collectives.h"

namespace banyan::parallel {

// [begin, begin + count) of something.
struct Part {
  int64_t begin = 0;
  int64_t count = 0;
};

// [0, whole) in `size` runs, the first ones longer by one where they do not divide.
Part even_part(int64_t whole, int64_t size, int64_t rank);

// Of the whole decoder.
struct DecoderSizes {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t expert_intermediate = 0;  // 0: no experts, or cut in another way (nn/moe.h)
  int64_t vocab = 0;
};

// Throws [config] naming the actor's key and the size that cannot be cut over `num_ranks`.
void check_cut(const DecoderSizes& whole, int64_t num_ranks);

class TensorParallel {
 public:
  // `ranks` is borrowed. Throws as check_cut.
  TensorParallel(Collectives& ranks, bool sequence_parallel, const DecoderSizes& whole);

  const Part& heads() const { return heads_; }
  const Part& kv_heads() const { return kv_heads_; }
  const Part& intermediate() const { return intermediate_; }
  const Part& expert_intermediate() const { return expert_intermediate_; }
  const Part& vocab() const { return vocab_; }
  int64_t whole_vocab() const { return whole_.vocab; }
  Collectives& ranks() const { return *ranks_; }
  bool is_sequence_parallel() const { return sequence_; }

  // Says of each parameter of a decoder with these sizes which part of its tensor it is, and has
  // finish_grads() call finish().
  void declare(ParamTable& table) const;

  // The sum over the ranks of `term` [T, E]: all rows, or own rows [ceil(T / n), E].
  at::Tensor sum_rows(at::Tensor term) const;
  // All rows from own ones: [T, E], or with the padding where `rows` is -1.
  at::Tensor gather_rows(const at::Tensor& x, int64_t rows = -1) const;
  // Own rows of x [T, E], which is equal on all ranks.
  at::Tensor own_rows(const at::Tensor& x) const;

  // What each rank does with a part of T rows, also without sequence parallel: its run of ceil(T /
  // n), the last ones less; all rows [T, ...] from the runs; and from them the rows of the residual
  // stream that are here.
  Part run_of(int64_t rows) const;
  at::Tensor gather_runs(const at::Tensor& run, int64_t rows) const;
  at::Tensor rows_from_runs(const at::Tensor& run, int64_t rows) const;

  // Tokens of this rank's part of the vocabulary. Throws [embedding] for an id beyond the whole.
  struct OwnTokens {
    at::Tensor ids;      // [T] int32, from 0 in the part; 0 for a token that is not here
    at::Tensor is_here;  // [T] bool
  };
  OwnTokens own_tokens(const at::Tensor& ids) const;

 private:
  Cut cut_of(const std::string& name) const;
  bool is_partial(const std::string& name) const;
  void finish(ParamTable& table) const;
  void sum_copies(Param& param) const;
  int64_t longest_run(int64_t rows) const;
  // Where several ranks hold one kv head.
  bool shares_kv_heads() const { return whole_.kv_heads < ranks_->size(); }

  Collectives* ranks_;
  bool sequence_;
  DecoderSizes whole_;
  Part heads_;
  Part kv_heads_;
  Part intermediate_;
  Part expert_intermediate_;
  Part vocab_;
};

// For layers that may be cut or not; null: not.
inline at::Tensor sum_rows(const TensorParallel* tensor, at::Tensor term) {
  return tensor != nullptr ? tensor->sum_rows(std::move(term)) : term;
}
inline at::Tensor gather_rows(const TensorParallel* tensor,
                              const at::Tensor& x,
                              int64_t rows = -1) {
  return tensor != nullptr ? tensor->gather_rows(x, rows) : x;
}

}  // namespace banyan::parallel
