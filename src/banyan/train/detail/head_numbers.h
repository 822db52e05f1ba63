// What the heads of a walk gave, per edge and head row of each block, and per logical token of
// samples. fp64 on the CPU: exact copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "banyan/train/block_pass.h"
#include "banyan/trie/plan.h"

namespace banyan::train::detail {

class HeadNumbers {
 public:
  enum class Kind : uint8_t {
    kValue,    // log-probabilities, on edges; of a value head values, on rows
    kEntropy,  // on rows, likewise the next
    kSumSquares,
  };

  // `type` is that of the numbers of samples. The plan is borrowed.
  HeadNumbers(const trie::Plan& plan,
              const HeadSpec& spec,
              models::HeadKind head,
              at::ScalarType type);

  // Those that `spec` asks for.
  const std::vector<Kind>& kinds() const { return kinds_; }
  bool has(Kind kind) const;
  bool on_edges(Kind kind) const { return kind == Kind::kValue && !is_value_head_; }

  // True once a block's numbers are there.
  bool is_there(int32_t block) const { return blocks_[block].is_there; }
  void put(int32_t block, const BlockHead& head);
  void put(int32_t block, Kind kind, const at::Tensor& numbers);
  void set_there(int32_t block) { blocks_[block].is_there = true; }
  // Undefined where they are not there.
  const at::Tensor& of(int32_t block, Kind kind) const;

  // The numbers of all blocks in one tensor, kind after kind: from those that are there, or to be
  // filled; and back.
  at::Tensor packed() const;
  void unpack(const at::Tensor& numbers);

  // The number of each logical token of `samples`.
  at::Tensor gather(const std::vector<int32_t>& samples, Kind kind) const;

 private:
  struct Block {
    std::array<at::Tensor, 3> numbers;  // by kind
    bool is_there = false;
  };
  int64_t count(size_t block, Kind kind) const;

  const trie::Plan& plan_;
  bool is_value_head_;
  at::ScalarType type_;
  std::vector<Kind> kinds_;
  std::vector<Block> blocks_;
};

}  // namespace banyan::train::detail
