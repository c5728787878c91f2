// What is assigned to a part of a recorded tensor, recorded: y[0] = u. The values of a storage then
// have a history as a whole, over its elements in the order of memory, and each tensor on them is a
// view of that. An assignment makes a new history of the old one, in which its own elements give no
// gradient, and of the value. Handles learn of it when their history is next asked for, so to make
// a view costs nothing; what was computed before keeps the history that it had. Invariant: an
// assignment counts up the version of the storage, so backward notices where it needs a value that
// was saved before; such values are let go at once.
#pragma once
#include <vector>

#include "core/autograd/graph.h"

namespace tessera {

/// Elements from the first to the last of a layout, those in gaps included.
int64_t reach_of(const Shape& shape, const Strides& strides);
/// Counts the assignments that the history of the memory of `t` contains, at this thread's level.
uint32_t assignments_to(const Tensor& t);
/// Appends the nodes that the histories of `storage` come from.
void append_histories(const Storage& storage, std::vector<Ref<GradNode>>& nodes);

}  // namespace tessera
