// One list of passes for ranks that each have a list of their own: 'F' for a forward, 'B' for a
// backward of a block, 'R' for a backward that its forward runs again in front of. Torch-free.
#pragma once

#include <string>
#include <vector>

namespace banyan::parallel {

// A list of which every given one is a part, in order: a rank goes through it and idles where the
// next pass is not its next one. The rank with most passes left says what comes next, the lower one
// of equals; so ranks that alternate alike lose nothing, whatever their numbers of blocks. Those
// that have a backward next take part in it together, and it is 'R' if that of any of them is.
std::string common_order(const std::vector<std::string>& passes);

}  // namespace banyan::parallel
