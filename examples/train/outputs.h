// Checks what a run will write before it begins. Invariant: a place that cannot be written to, or
// that holds what a run reads or a checkpoint needs, is an error before the first step and not
// after the last; nothing that exists has then been changed.
#pragma once
#include "examples/train/options.h"

namespace tessera::train {

/// True if --save names a folder: it ends in '/'.
inline bool saves_folder(const Options& o) { return o.save.ends_with('/'); }

/// Checks all outputs, on the rank that writes, by creating a file where --save will. Throws
/// UserError that names the flag, the path and the reason.
void check_outputs(const Options& o);

}  // namespace tessera::train
