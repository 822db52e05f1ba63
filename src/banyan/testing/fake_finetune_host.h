// FakeFinetuneHost: the outside world for tests of training on given text. Rows come in a fixed
// order, again and again; everything logged is kept.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "banyan/train/finetune_host.h"

namespace banyan::testing {

// Rows of unequal lengths on common trunks; a row has one sample (SFT) or two, a pair of answers to
// one question. Some leave a token out of the loss.
inline std::vector<train::Example> finetune_rows(int32_t count, int32_t num_samples) {
  std::vector<train::Example> out;
  for (int32_t row = 0; row < count; ++row) {
    train::Example& example = out.emplace_back();
    for (int32_t k = 0; k < num_samples; ++k) {
      Sample sample;
      sample.tokens = {7, 8, 9, 10 + row % 3};
      sample.scored.assign(4, 0);
      for (int32_t t = 0; t < 2 + (row * 3 + k) % 7; ++t) {
        sample.tokens.push_back(20 + (row * 5 + k * 11 + t) % 60);
        sample.scored.push_back(t == 1 && row % 4 == 0 ? 0 : 1);
      }
      example.push_back(sample);
    }
  }
  return out;
}

class FakeFinetuneHost final : public train::FinetuneHost {
 public:
  FakeFinetuneHost(std::vector<train::Example> train, std::vector<train::Example> validation)
      : data_{std::move(train), std::move(validation)} {}

  std::vector<int64_t> next_rows(int64_t count) override {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < count; ++i) {
      rows.push_back(next_++ % static_cast<int64_t>(data_[0].size()));
    }
    return rows;
  }
  std::vector<train::Example> examples(const std::vector<int64_t>& rows, bool validation) override {
    std::vector<train::Example> out;
    for (const int64_t row : rows) out.push_back(data_[validation ? 1 : 0].at(row));
    return out;
  }

  void log(int64_t step, const Metrics& metrics) override {
    logged[step] = metrics;
    if (stop_after >= 0 && step >= stop_after) stop_ = true;
  }
  void say(const std::string& line) override { said.push_back(line); }
  bool should_stop() override { return stop_; }
  std::string save_state() override { return std::to_string(next_); }
  void load_state(const std::string& state) override { next_ = std::stoll(state); }

  std::map<int64_t, Metrics> logged;  // by step
  std::vector<std::string> said;
  int64_t stop_after = -1;  // asks the trainer to stop once this step is logged

 private:
  std::vector<train::Example> data_[2];
  int64_t next_ = 0;
  bool stop_ = false;
};

}  // namespace banyan::testing
