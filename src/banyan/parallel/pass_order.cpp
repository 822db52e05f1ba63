#include "banyan/parallel/pass_order.h"

namespace banyan::parallel {

std::string common_order(const std::vector<std::string>& passes) {
  std::vector<size_t> at(passes.size(), 0);
  std::string order;
  while (true) {
    size_t longest = 0;
    size_t left = 0;
    for (size_t rank = 0; rank < passes.size(); ++rank) {
      if (passes[rank].size() - at[rank] <= left) continue;
      longest = rank;
      left = passes[rank].size() - at[rank];
    }
    if (left == 0) return order;
    const char next = passes[longest][at[longest]];
    order += next;
    for (size_t rank = 0; rank < passes.size(); ++rank) {
      if (at[rank] < passes[rank].size() && passes[rank][at[rank]] == next) ++at[rank];
    }
  }
}

}  // namespace banyan::parallel
