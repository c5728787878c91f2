// What a run will write, looked at before it begins. Invariant: a place that cannot be written to,
// or that holds what a run reads or a checkpoint needs, is an error before the first step and not
// after the last; nothing that exists was changed then.
#pragma once
#include "examples/train/options.h"

namespace tessera::train {

/// --save names a folder: it ends in '/'.
inline bool saves_folder(const Options& o) { return o.save.ends_with('/'); }

/// On the rank that writes. Tries to make a file where --save will. Throws UserError naming the
/// flag, the path and the reason.
void check_outputs(const Options& o);

}  // namespace tessera::train
