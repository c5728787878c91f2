// Prepares the loops of a body for scheduling: which one is vectorised, which are inner, in what
// order they run, and which of them merge into one. What the body computes does not change.
#pragma once
#include "compile/codegen/body.h"

namespace tessera::compiler {

/// Whether the loops of `a` are among those of `b`.
inline bool within(LoopMask a, LoopMask b) { return (a & ~b) == 0; }
/// The loops that an access moves with.
LoopMask moving_loops(const Access& a);
/// The product of the extents of the loops in `mask`.
int64_t count_loops(const Body& body, LoopMask mask);

/// `body` without its loops of extent 1.
Body without_single_loops(const Body& body);
/// The loop along which most bytes are contiguous in memory.
int vector_loop(const Body& body);
/// Loop `vector`, and the loops that a value is reduced over together with it.
LoopMask inner_loops(const Body& body, int vector);
/// Returns `body` with its outer loops first (`outer` says how many) and loop `vector` last.
/// Neighbours that every access treats as one loop are merged.
Body in_order(const Body& body, LoopMask inner, int vector, int& outer);

}  // namespace tessera::compiler
