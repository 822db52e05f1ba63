// Random trees by growing one path at a time: a prefix is extended by a segment, then forks into
// children; leaves become samples. Randomness is Philox of (seed, draw number).
#include "banyan/testing/random_trie.h"

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/core/rng.h"

namespace banyan::testing {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  int32_t below(int32_t bound) {
    const auto word = philox(seed_, next_++, 0x7472696573ULL)[0];
    return static_cast<int32_t>((uint64_t{word} * static_cast<uint64_t>(bound)) >> 32);
  }
  bool chance(double probability) { return below(1 << 24) < probability * (1 << 24); }

 private:
  uint64_t seed_;
  uint64_t next_ = 0;
};

class Grower {
 public:
  explicit Grower(const RandomTrieOptions& options) : options_(options), random_(options.seed) {}

  std::vector<Sample> run() {
    while (samples_.empty()) grow(Sample{}, options_.depth);
    shuffle();
    for (size_t i = 0; i < samples_.size(); ++i) samples_[i].uid = static_cast<int64_t>(i);
    return std::move(samples_);
  }

 private:
  bool full() const { return static_cast<int32_t>(samples_.size()) >= options_.max_samples; }

  void extend(Sample& path, int32_t tokens) {
    for (int32_t i = 0; i < tokens; ++i) {
      path.tokens.push_back(random_.below(options_.vocab));
      if (options_.random_positions) {
        const int32_t last = path.positions.empty() ? -1 : path.positions.back();
        path.positions.push_back(last + 1 + random_.below(3));
      }
    }
  }

  void grow(Sample path, int32_t level) {
    if (full()) return;
    const bool single = level == 0 && options_.one_token_suffixes;
    extend(path, single ? 1 : 1 + random_.below(options_.max_segment));
    if (level == 0) return emit(path);
    const int32_t fan_out = 1 + random_.below(options_.max_fan_out);
    for (int32_t child = 0; child < fan_out; ++child) grow(path, level - 1);
  }

  void emit(const Sample& path) {
    add(path);
    if (random_.chance(options_.duplicate)) add(path);
    if (path.tokens.size() > 1 && random_.chance(options_.prefix_of_another)) {
      Sample prefix = path;
      const int32_t length = 1 + random_.below(static_cast<int32_t>(path.tokens.size()) - 1);
      prefix.tokens.resize(length);
      if (!prefix.positions.empty()) prefix.positions.resize(length);
      add(prefix);
    }
  }

  void add(Sample sample) {
    if (full()) return;
    if (options_.scored < 1.0) {
      for (size_t i = 0; i < sample.tokens.size(); ++i) {
        sample.scored.push_back(random_.chance(options_.scored) ? 1 : 0);
      }
    }
    samples_.push_back(std::move(sample));
  }

  void shuffle() {
    for (size_t i = samples_.size(); i > 1; --i) {
      std::swap(samples_[i - 1], samples_[random_.below(static_cast<int32_t>(i))]);
    }
  }

  RandomTrieOptions options_;
  Random random_;
  std::vector<Sample> samples_;
};

std::vector<Sample> of_tokens(const std::vector<std::vector<int32_t>>& rows) {
  std::vector<Sample> samples;
  for (const auto& row : rows) {
    Sample sample;
    sample.uid = static_cast<int64_t>(samples.size());
    sample.tokens = row;
    samples.push_back(std::move(sample));
  }
  return samples;
}

// `count` samples: `trunk` common tokens, then `suffix` own ones whose first differs between
// samples.
std::vector<Sample> star(
    Random& random, int32_t vocab, int32_t count, int32_t trunk, int32_t suffix) {
  std::vector<int32_t> common;
  for (int32_t i = 0; i < trunk; ++i) common.push_back(random.below(vocab));
  std::vector<std::vector<int32_t>> rows;
  for (int32_t s = 0; s < count; ++s) {
    rows.push_back(common);
    for (int32_t i = 0; i < suffix; ++i)
      rows.back().push_back(i == 0 ? s % vocab : random.below(vocab));
  }
  return of_tokens(rows);
}

// Scores only tokens from `prompt` on.
std::vector<Sample> responses_only(std::vector<Sample> samples, size_t prompt) {
  for (Sample& sample : samples) {
    sample.scored.assign(sample.tokens.size(), 0);
    for (size_t t = prompt; t < sample.tokens.size(); ++t) sample.scored[t] = 1;
  }
  return samples;
}

std::vector<TrieCase> star_cases(Random& random, int32_t vocab) {
  std::vector<TrieCase> cases;
  cases.push_back({"one_path", star(random, vocab, 1, 9, 0)});
  cases.push_back({"all_shared", star(random, vocab, 5, 12, 0)});
  cases.push_back({"none_shared", star(random, vocab, 6, 0, 7)});
  cases.push_back({"one_token_suffixes", responses_only(star(random, vocab, 7, 6, 1), 6)});
  cases.push_back({"wide_fork", star(random, vocab, 16, 3, 2)});
  cases.push_back({"long_trunk", responses_only(star(random, vocab, 8, 150, 18), 150)});
  // A prompt that is a sample by itself: its response is empty and nothing of it is scored.
  std::vector<Sample> empty = responses_only(star(random, vocab, 4, 8, 5), 8);
  empty[2].tokens.resize(8);
  empty[2].scored.resize(8);
  cases.push_back({"empty_response", std::move(empty)});
  return cases;
}

}  // namespace

std::vector<Sample> random_samples(const RandomTrieOptions& options) {
  BANYAN_CHECK(options.vocab >= 1 && options.depth >= 0 && options.max_fan_out >= 1 &&
                   options.max_segment >= 1 && options.max_samples >= 1,
               "[random_trie] options: wanted positive sizes");
  return Grower(options).run();
}

std::vector<Sample> samples_from(const std::vector<std::vector<int32_t>>& rows) {
  return of_tokens(rows);
}

std::vector<Sample> toy_samples() {
  return of_tokens({{1, 2, 3, 4, 5, 6, 7, 8},
                    {1, 2, 3, 4, 9, 10},
                    {1, 2, 3},
                    {1, 2, 3, 4, 5, 6, 11},
                    {1, 2, 3, 4, 9, 10},
                    {12, 13, 14},
                    {12, 13, 15, 2, 1}});
}

std::vector<TrieCase> trie_cases(uint64_t seed, int32_t vocab) {
  BANYAN_CHECK(vocab >= 16, "[random_trie] vocab: wanted >= 16, got ", vocab);
  Random random(seed);
  std::vector<TrieCase> cases = star_cases(random, vocab);
  cases.push_back({"toy", toy_samples()});
  cases.push_back({"one_node", of_tokens({{3}})});
  cases.push_back({"one_token_samples", of_tokens({{3}, {5}, {3}, {0}})});
  cases.push_back(
      {"duplicates", of_tokens({{4, 4, 4}, {4, 4, 5}, {4, 4, 4}, {4, 4, 5}, {4, 4, 4}})});
  cases.push_back(
      {"prefix_of_another", of_tokens({{1, 2, 3, 4}, {1, 2}, {1, 2, 3}, {1}, {1, 2, 7}})});

  RandomTrieOptions options;
  options.vocab = vocab;
  const auto add = [&](const std::string& name, uint64_t offset) {
    options.seed = seed * 64 + offset;
    cases.push_back({name, random_samples(options)});
  };
  options.depth = 6;
  options.max_fan_out = 2;
  add("depth_6", 1);
  options.depth = 3;
  options.max_fan_out = 4;
  options.max_samples = 24;
  add("mixed_0", 2);
  add("mixed_1", 3);
  options.one_token_suffixes = true;
  add("mixed_2", 4);
  options.one_token_suffixes = false;
  options.scored = 0.5;
  add("masks_differ", 5);
  options.scored = 0.0;
  add("nothing_scored", 6);
  options.scored = 1.0;
  options.random_positions = true;
  add("positions_with_gaps", 7);
  return cases;
}

}  // namespace banyan::testing
