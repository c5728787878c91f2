// What may be written where checkpoints are. Invariant: a path that passes is none that a saved
// step or `latest` needs, whatever links lead to it; so a writer that asks first destroys no save.
#pragma once
#include <string>

namespace tessera::checkpoint {

/// For writers of files and folders other than checkpoints. Throws UserError, beginning with `who`,
/// where `path` is in a saved step or is one, or is `latest` or has the name of a step in a folder
/// of checkpoints. `own`: such a folder that may still be empty; "": none. Symbolic links are
/// followed, also those that lead to nothing yet.
void check_may_write(const std::string& path, const std::string& who, const std::string& own = "");

/// For a folder that steps will be saved into. Throws UserError where it is in a saved step or
/// `latest` in it is a file that no save wrote, which the first save would replace; and where its
/// path is so long that the files of a step cannot be named.
void check_may_save(const std::string& folder, const std::string& who);

}  // namespace tessera::checkpoint
