// Assignment to a part of a recorded tensor (y[0] = u), itself recorded. Once there is one, the
// elements of a storage, in the order of memory, have one history, and each tensor on the storage
// is a view of them. An assignment makes a new history from the old one, which gets no gradient at
// the elements that are overwritten, and from the value's. A tensor takes over the new history when
// its own is next read, so making a view costs nothing; results computed before keep theirs.
// Invariant: an assignment counts up the version of the storage, so backward throws where it needs
// a saved value that was overwritten; such values are freed at once.
#pragma once
#include <vector>

#include "core/autograd/graph.h"

namespace tessera {

/// How many elements of memory a layout spans from its first to its last, gaps included.
int64_t reach_of(const Shape& shape, const Strides& strides);
/// How many assignments the history of the memory of `t` has at this thread's level.
uint32_t assignments_to(const Tensor& t);
/// Appends to `nodes` the nodes that the histories of `storage`, at every level, come from.
void append_histories(const Storage& storage, std::vector<Ref<GradNode>>& nodes);

}  // namespace tessera
