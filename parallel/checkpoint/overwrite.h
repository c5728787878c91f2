// Checks what may be written where checkpoints are. Invariant: a path that passes is not one that a
// saved step or `latest` needs, whatever links lead to it; so a writer that checks first destroys
// no save.
#pragma once
#include <string>

namespace tessera::checkpoint {

/// For writers of files and folders other than checkpoints. Throws UserError, whose text begins
/// with `who`, where `path` is a saved step or in one, or is `latest` or the name of a step in a
/// folder of checkpoints. `own`: a folder that counts as a folder of checkpoints though it may
/// still be empty; "": none. Symbolic links are followed, also those to files that do not exist
/// yet.
void check_may_write(const std::string& path, const std::string& who, const std::string& own = "");

/// For a folder that steps will be saved into. Throws UserError where it is in a saved step, where
/// `latest` in it is a file that no save wrote (the first save would replace it), and where its
/// path is too long for the names of a step's files.
void check_may_save(const std::string& folder, const std::string& who);

}  // namespace tessera::checkpoint
