// Resident memory of this process, from the kernel's accounting. Torch-free.
#pragma once

#include <cstdint>

namespace banyan {

// Bytes resident now; 0 where /proc is missing.
int64_t resident_bytes();

// Highest resident bytes since the process started or since the last reset.
int64_t peak_resident_bytes();

// Starts a new peak measurement; false where the kernel does not allow it.
bool reset_peak_resident();

}  // namespace banyan
