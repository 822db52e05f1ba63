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
    char next = passes[longest][at[longest]];
    const bool is_forward = next == 'F';
    for (size_t rank = 0; rank < passes.size(); ++rank) {
      if (at[rank] == passes[rank].size()) continue;
      const char own = passes[rank][at[rank]];
      if ((own == 'F') != is_forward) continue;
      if (own == 'R') next = 'R';
      ++at[rank];
    }
    order += next;
  }
}

}  // namespace banyan::parallel
