#include "banyan/bench/workload.h"

#include <functional>
#include <regex>

#include "banyan/core/error.h"
#include "banyan/core/rng.h"

namespace banyan::bench {
namespace {

constexpr int64_t kSystem = 512;
constexpr int64_t kUser = 32;
constexpr int64_t kAssistant = 64;
constexpr int64_t kTreeSegment = 50;
constexpr int64_t kFanTrunk = 32;

class Tokens {
 public:
  Tokens(int32_t vocab, uint64_t seed) : vocab_(vocab), seed_(seed) {}

  // Appends n random tokens.
  void append(int64_t n, bool scored, Sample& sample) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t word = philox(seed_, counter_++, 0)[0];
      sample.tokens.push_back(static_cast<int32_t>(word % static_cast<uint32_t>(vocab_)));
      sample.scored.push_back(scored ? 1 : 0);
    }
  }

 private:
  int32_t vocab_;
  uint64_t seed_;
  uint64_t counter_ = 0;
};

// Children of one node must differ in their first token, or random draws would merge them.
void mark(Sample& sample, size_t position, int64_t child, int32_t vocab) {
  sample.tokens[position] = static_cast<int32_t>(child % vocab);
}

std::vector<Sample> prompts(
    int64_t groups, int64_t p, int64_t r, int64_t n, int32_t vocab, Tokens& tokens) {
  std::vector<Sample> samples;
  for (int64_t group = 0; group < groups; ++group) {
    Sample prompt;
    tokens.append(p, /*scored=*/false, prompt);
    mark(prompt, 0, group, vocab);
    for (int64_t i = 0; i < n; ++i) {
      Sample sample = prompt;
      tokens.append(r, /*scored=*/true, sample);
      mark(sample, p, i, vocab);
      samples.push_back(std::move(sample));
    }
  }
  return samples;
}

std::vector<Sample> turns(int64_t k, int64_t n, int32_t vocab, Tokens& tokens) {
  Sample system;
  tokens.append(kSystem, /*scored=*/false, system);
  std::vector<Sample> samples;
  for (int64_t chat = 0; chat < n; ++chat) {
    Sample history = system;
    for (int64_t turn = 0; turn < k; ++turn) {
      tokens.append(kUser, /*scored=*/false, history);
      if (turn == 0) mark(history, kSystem, chat, vocab);
      Sample sample = history;
      tokens.append(kAssistant, /*scored=*/true, sample);
      history.tokens = sample.tokens;
      history.scored.resize(sample.tokens.size(), 0);
      samples.push_back(std::move(sample));
    }
  }
  return samples;
}

std::vector<Sample> tree(int64_t b, int64_t d, int32_t vocab, Tokens& tokens) {
  std::vector<Sample> samples;
  const std::function<void(const Sample&, int64_t, int64_t)> grow =
      [&](const Sample& path, int64_t child, int64_t level) {
        Sample sample = path;
        tokens.append(kTreeSegment, /*scored=*/level > 0, sample);
        mark(sample, path.tokens.size(), child, vocab);
        if (level == d) {
          samples.push_back(std::move(sample));
          return;
        }
        for (int64_t i = 0; i < b; ++i) grow(sample, i, level + 1);
      };
  grow({}, 0, 0);
  return samples;
}

// "4k" = 4096.
int64_t number(const std::string& text) {
  const int64_t value = std::stoll(text);
  return text.back() == 'k' ? 1024 * value : value;
}

}  // namespace

std::vector<std::string> preset_names() {
  return {"P100R200n8",
          "P512R512n8",
          "P4kR256n16",
          "turns10n8",
          "tree-b2d6",
          "P8R256n8",
          "alone8",
          "fan512"};
}

std::vector<Sample> make_workload(const std::string& name, int32_t vocab, uint64_t seed) {
  static const std::regex kGroup("P(\\d{1,6}k?)R(\\d{1,6}k?)n(\\d{1,4})(?:x(\\d{1,4}))?");
  static const std::regex kTurns("turns(\\d{1,3})n(\\d{1,3})");
  static const std::regex kTree("tree-b(\\d{1,2})d(\\d)");
  static const std::regex kAlone("alone(\\d{1,4})");
  static const std::regex kFan("fan(\\d{1,5})");
  Tokens tokens(vocab, seed);
  std::smatch found;
  bool positive = true;
  const auto field = [&](int i) {
    const int64_t value = number(found[i]);
    positive = positive && value > 0;
    return value > 0 ? value : 1;
  };
  std::vector<Sample> samples;
  if (std::regex_match(name, found, kGroup)) {
    samples = prompts(found[4].matched ? field(4) : 1, field(1), field(2), field(3), vocab, tokens);
  } else if (std::regex_match(name, found, kTurns)) {
    samples = turns(field(1), field(2), vocab, tokens);
  } else if (std::regex_match(name, found, kTree)) {
    samples = tree(field(1), field(2), vocab, tokens);
  } else if (std::regex_match(name, found, kAlone)) {
    samples = prompts(field(1), 100, 200, 1, vocab, tokens);
  } else if (std::regex_match(name, found, kFan)) {
    samples = prompts(1, kFanTrunk, 1, field(1), vocab, tokens);
  }
  BANYAN_CHECK(!samples.empty() && positive,
               "[bench] --preset: wanted P<p>R<r>n<n>, P<p>R<r>n<n>x<g>, turns<k>n<n>, "
               "tree-b<b>d<d>, alone<n> or "
               "fan<n> (numbers above 0), got '",
               name,
               "'");
  for (size_t i = 0; i < samples.size(); ++i) samples[i].uid = static_cast<int64_t>(i);
  return samples;
}

}  // namespace banyan::bench
