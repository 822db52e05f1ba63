// Batches of fixed shape and random tokens, named by their shape, for `banyan bench trie`. The same
// name, vocabulary and seed give the same tokens on every machine. Torch-free.
//
//   P<p>R<r>n<n>       one prompt of p tokens, n responses of r tokens (scored); 4k = 4096
//   P<p>R<r>n<n>x<g>   g such groups, of different prompts
//   turns<k>n<n>       n chats of k turns after one system prompt of 512 tokens; a turn is 32
//   tokens
//                      of the user and 64 of the assistant. Each turn is a sample of its own that
//                      holds the whole history and scores only its own 64
//   tree-b<b>d<d>      a full b-ary tree, d levels below the root, segments of 50 tokens; a sample
//                      per leaf; all but the root's tokens are scored
//   alone<n>           n samples of 300 tokens, 200 scored, that share nothing
//   fan<n>             a trunk of 32 tokens and n branches of one token
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/sample.h"

namespace banyan::bench {

// What `banyan bench trie` measures unless told otherwise: those that should win, then those that
// have little or nothing to gain.
std::vector<std::string> preset_names();

// Samples of the named shape, ids in [0, vocab). Throws [bench] for a name of no known form.
std::vector<Sample> make_workload(const std::string& name, int32_t vocab, uint64_t seed);

}  // namespace banyan::bench
