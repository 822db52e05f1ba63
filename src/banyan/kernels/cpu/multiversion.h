// Function multiversioning for plain loops: the compiler emits one body per instruction set and the
// loader picks the best one the processor has, so one build runs on any x86-64 and vectorises where
// it can. Use on non-template functions over raw pointers; helpers called from them are
// BANYAN_INLINE. Not under sanitizers: the loader chooses before they are set up.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define BANYAN_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BANYAN_MULTIVERSION
#endif

// In front of a loop none of whose iterations reads what another writes.
#if defined(__clang__)
#define BANYAN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define BANYAN_INDEPENDENT _Pragma("GCC ivdep")
#endif

#define BANYAN_INLINE inline __attribute__((always_inline))
