#include "banyan/train/finetune_exchange.h"

#include <algorithm>
#include <utility>

#include "banyan/parallel/balance.h"
#include "banyan/train/wire.h"

namespace banyan::train {
namespace {

double num_tokens(const Example& example) {
  double tokens = 0.0;
  for (const auto& sample : example) tokens += static_cast<double>(sample.tokens.size());
  return tokens;
}

}  // namespace

RowsOfRank spread_rows(const std::vector<int64_t>& rows,
                       std::vector<Example> examples,
                       const parallel::Collectives& ranks) {
  if (ranks.is_alone()) return {rows, std::move(examples)};
  std::vector<double> costs;
  for (const Example& example : examples) costs.push_back(num_tokens(example));
  const parallel::Balance balance = parallel::balance(costs, ranks.size());
  RowsOfRank own;
  for (const int64_t i : balance.pieces[ranks.rank()]) {
    own.rows.push_back(rows[i]);
    own.examples.push_back(std::move(examples[i]));
  }
  return own;
}

BatchResult merge_batch(const BatchResult& own, double weight, parallel::Collectives& ranks) {
  if (ranks.is_alone()) return own;
  WireWriter out;
  out.put(own.loss);
  out.put(own.logical_tokens);
  out.put(own.unique_tokens);
  out.put(own.computed_tokens);
  put_metrics(own.metrics, out);
  out.put(own.warnings);
  BatchResult all;
  all.weight = weight;
  for (const std::string& bytes : ranks.all_gather_bytes(out.bytes())) {
    WireReader in(bytes);
    all.loss += in.next<double>();
    all.logical_tokens += in.next<int64_t>();
    all.unique_tokens += in.next<int64_t>();
    all.computed_tokens += in.next<int64_t>();
    algo::merge(get_metrics(in), all.metrics);
    add_new(in.next<std::vector<std::string>>(), all.warnings);
  }
  return all;
}

}  // namespace banyan::train
