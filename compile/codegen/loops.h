// The loops of a body before its values find their places: which one is vectorised, which are
// inner, in what order they run, and which of them are one. What a body computes stays as it is.
#pragma once
#include "compile/codegen/body.h"

namespace tessera::compiler {

/// Whether the loops of `a` are among those of `b`.
inline bool within(LoopMask a, LoopMask b) { return (a & ~b) == 0; }
/// The loops that an access moves with.
LoopMask moving_loops(const Access& a);
/// Elements that the loops of `mask` have together.
int64_t count_loops(const Body& body, LoopMask mask);

/// `body` without its loops of extent 1.
Body without_single_loops(const Body& body);
/// The loop that most bytes are neighbours along.
int vector_loop(const Body& body);
/// Loop `vector` and those that something is reduced over together with it.
LoopMask inner_loops(const Body& body, int vector);
/// `body` with its outer loops first, `outer` of them, and loop `vector` last; neighbours that
/// every access treats as one are one.
Body in_order(const Body& body, LoopMask inner, int vector, int& outer);

}  // namespace tessera::compiler
