// The training loop: data, forward, backward, reduction, clipping, optimizer, reports.
#pragma once
#include "collectives/process_group.h"
#include "examples/train/options.h"
#include "examples/train/task.h"

namespace tessera::train {

/// Trains as the options say. Rank 0 reports on stdout and writes metrics and the saved file. With
/// --checkpoint, SIGINT and SIGTERM end the run after a step that is then saved, the same on all
/// ranks. Returns that signal, else 0.
int run(const Options& options, Ref<ProcessGroup> group);

}  // namespace tessera::train
