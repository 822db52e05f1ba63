// Which pages of keys and values a part of a pass will read, to be fetched behind the products that
// stand before attention: they come from memory, and products leave most of its bandwidth idle.
#pragma once

#include <cstdint>

#include "banyan/kernels/cpu/decoder_pass.h"
#include "banyan/kernels/cpu/fetch_queue.h"

namespace banyan::kernels {

// Replaces what `queue` holds by the pages of writes [begin, end) in the tiles of one layer, a page
// of siblings once, up to what a core's share of a third-level cache may hold.
void queue_pages_of(const PassRows& rows,
                    const AttentionShape& shape,
                    const uint16_t* tiles,
                    int64_t begin,
                    int64_t end,
                    FetchQueue& queue);

}  // namespace banyan::kernels
