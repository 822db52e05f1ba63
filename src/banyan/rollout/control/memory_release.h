// Memory that is given back to the system, and the proof of it: the pages behind the storages are
// counted before and after, so that "freed" is what the kernel says and not what was hoped for (an
// allocator that keeps segments, or a reference that somebody still holds, frees nothing).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>
#include <vector>

namespace banyan::rollout {

// Drops `memory` and returns the bytes that went back to the system. Throws RequestError 500 with
// both numbers if that is less than 90 % of what was resident before.
int64_t release_memory(std::vector<c10::Storage> memory, c10::Device device);

// Throws RequestError 503 with both numbers if `num_bytes` are more than `free_bytes` (0: not
// known). `what` begins the text: "[rollout] wake: kv_cache".
void check_free_memory(const std::string& what, int64_t num_bytes, int64_t free_bytes);

}  // namespace banyan::rollout
