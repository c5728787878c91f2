// Every verb on every dtype against a serial reference: one program that any rank of any backend
// runs. Values are small integers, so each operator is exact in each dtype.
#pragma once
#include "collectives/process_group.h"

namespace tessera::test {

/// Gloo is not built for ThreadSanitizer, which would report each of its lock-free steps.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kHaveGloo = false;
#else
inline constexpr bool kHaveGloo = true;
#endif

/// Where the tensors of a check lie: in memory of their own, or in the group's (allocate).
enum class Memory { kOwn, kGroup };

/// Runs all verbs on `group`, with tensors on the default device, with pieces of `n` elements;
/// throws UserError naming the first wrong element.
void check_all_verbs(ProcessGroup& group, int64_t n, Memory memory = Memory::kOwn);
/// The same for one dtype.
void check_verbs(ProcessGroup& group, DType dtype, int64_t n, Memory memory = Memory::kOwn);

/// Sums of terms that are rounded: the bits must be equal however often a size has been reduced
/// (which decides the way), and wherever the tensors of ranks are.
void check_ways(ProcessGroup& group);

/// Calls `kind` with arguments that differ in `variant` on rank `odd`: 0 as all, 1 another kind,
/// 2 another operator, 3 another dtype, 4 another count, 5 another root (or one call too many).
void call_variant(ProcessGroup& group, CollKind kind, int variant, int odd);

}  // namespace tessera::test
