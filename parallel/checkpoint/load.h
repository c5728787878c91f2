// Loads checkpoints. Each rank names the boxes that it wants and where they go. However the saved
// tensors were cut, only the bytes of the common parts are read. Invariant: either every element
// asked for was filled from the checkpoint, or an error on every rank says why not.
// Internal: not part of the public interface.
#pragma once
#include <functional>

#include "collectives/process_group.h"
#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/reader.h"

namespace tessera::checkpoint {

struct Loaded {
  int64_t step = 0;
  std::string folder;   // of that step
  std::string warning;  // if not empty: `latest` could not be used; see Newest::warning
  Extra extra;
  std::vector<std::string> missing;     // asked for by a rank, not in the checkpoint
  std::vector<std::string> unexpected;  // in the checkpoint, asked for by no rank
  ReadCost read;                        // on this rank
};

struct LoadOptions {
  std::string only = "*";  // names that do not match are neither loaded nor missed; * is any text
  bool strict = true;  // true: missing and unexpected names are errors; false: they are returned
  Millis timeout{0};   // how long a rank may make no progress; 0: the group's
  // Called with step, folder and extra before names are compared and tensors are read. If it throws
  // UserError, load() throws that on all ranks.
  std::function<void(const Loaded&)> accept = {};
};

/// Fills the values of `pieces` (dense or strided, on the CPU) and bumps their versions. `path` is
/// a folder of steps (the newest is taken) or that of one step. All ranks of `group` (null: the
/// world; for one rank of several alone: solo_group()) must call it, each with its own pieces.
/// Throws UserError on all ranks when the checkpoint is damaged, or names, dtypes or shapes do not
/// fit; the values of pieces are then unspecified.
Loaded load(const std::string& path, std::span<const Piece> pieces, ProcessGroup* group = nullptr,
            const LoadOptions& options = {});

/// Does what newest(folder) does; all ranks of `group` get the same answer.
std::optional<Newest> newest(const std::string& folder, ProcessGroup& group);

}  // namespace tessera::checkpoint
