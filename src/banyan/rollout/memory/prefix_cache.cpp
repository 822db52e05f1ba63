// The pages of the prefix tree that nobody holds: two lists in order of use, of those that no
// waiting path wants and of those that one does; the first is given up first.
#include "banyan/rollout/memory/prefix_tree.h"

namespace banyan::rollout {

void PrefixTree::unlink(int32_t index) {
  Node& node = nodes_[index];
  List& list = lists_[node.list];
  (node.older >= 0 ? nodes_[node.older].newer : list.oldest) = node.newer;
  (node.newer >= 0 ? nodes_[node.newer].older : list.newest) = node.older;
  node.list = kNoList;
  --num_cached_;
}

void PrefixTree::link_newest(int32_t index) {
  Node& node = nodes_[index];
  node.list = node.num_users > 0 ? kWanted : kUnwanted;
  List& list = lists_[node.list];
  node.older = list.newest;
  node.newer = -1;
  (list.newest >= 0 ? nodes_[list.newest].newer : list.oldest) = index;
  list.newest = index;
  ++num_cached_;
}

// Gives the tree's hold of a page back; nobody else has one.
void PrefixTree::free_page(int32_t index) {
  Node& node = nodes_[index];
  if (node.list != kNoList) unlink(index);
  unlist_opening(index);
  pool_.release(node.page);
  node.page = -1;
  node.computed = 0;
}

// Somebody let go of a node's page.
void PrefixTree::release(int32_t index) {
  Node& node = nodes_[index];
  pool_.release(node.page);
  if (pool_.holders(node.page) > 1) return;
  if (node.generation == generation_ && node.computed > 0) {
    link_newest(index);
  } else {
    free_page(index);
    remove_if_unused(index);
  }
}

bool PrefixTree::evict_one() {
  for (const List& list : lists_) {
    if (list.oldest < 0) continue;
    const int32_t index = list.oldest;
    free_page(index);
    remove_if_unused(index);
    ++num_evicted_;
    return true;
  }
  return false;
}

void PrefixTree::new_generation() {
  for (List& list : lists_) {
    while (list.oldest >= 0) {
      const int32_t index = list.oldest;
      free_page(index);
      remove_if_unused(index);
    }
  }
  ++generation_;
  roots_.clear();
  by_tokens_.clear();
  by_opening_.clear();
}

}  // namespace banyan::rollout
