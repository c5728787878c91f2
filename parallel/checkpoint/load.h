// Loading: each rank names the boxes it wants and where they go; whatever cutting the checkpoint
// was saved under, only the bytes of their common parts are read. Invariant: either every element
// asked for was filled from the checkpoint, or an error says on every rank why not.
#pragma once
#include <functional>

#include "collectives/process_group.h"
#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/reader.h"

namespace tessera::checkpoint {

struct Loaded {
  int64_t step = 0;
  std::string folder;   // of that step
  std::string warning;  // not empty: the newest step could not be determined the usual way
  Extra extra;
  std::vector<std::string> missing;     // asked for by a rank, not in the checkpoint
  std::vector<std::string> unexpected;  // in the checkpoint, asked for by no rank
  ReadCost read;                        // on this rank
};

struct LoadOptions {
  std::string only = "*";  // names that do not match are neither loaded nor missed; * is any text
  bool strict = true;      // missing and unexpected names are errors; false: they are returned
  Millis timeout{0};       // how long a rank may stand still; 0: the group's
  // Looks at step, folder and extra before names are compared and tensors read; a UserError that it
  // throws is that of load(), on all ranks.
  std::function<void(const Loaded&)> accept = {};
};

/// Fills the values of `pieces` (dense or strided, on the CPU), bumping their versions. `path`: a
/// folder of steps (the newest is taken) or one step's. All ranks of `group` (null: the world; one
/// rank of several alone: solo_group()) call it, each with its own pieces. Throws UserError on all
/// ranks when the checkpoint is damaged, or names, dtypes or shapes do not fit; then the values of
/// pieces are unspecified.
Loaded load(const std::string& path, std::span<const Piece> pieces, ProcessGroup* group = nullptr,
            const LoadOptions& options = {});

/// As newest(folder), agreed on by all ranks of `group`.
std::optional<Newest> newest(const std::string& folder, ProcessGroup& group);

}  // namespace tessera::checkpoint
