// The secret that the agents of a job share. Invariant: what is read from a file that others than
// its owner can read or write is refused, and no secret is ever printed; two secrets are compared
// by their fingerprints.
#pragma once
#include <string>

namespace tessera::launcher {

struct Secret {
  std::string bytes;   // what is proved by each side, never sent
  std::string source;  // where it comes from: "/etc/job.key", "TESSERA_JOB_KEY"
};

/// The first of: the file `path` (--key-file) where it is not empty; TESSERA_JOB_KEY, at least 16
/// characters; ~/.tessera/key, which is made, with 32 random bytes as hexadecimal digits and mode
/// 0600, where it does not exist. Space at the ends does not count. Two processes may make it at
/// once, also on hosts that share the folder; both then have the same one. Throws UserError for a
/// file that others can read or write, that another user owns, that has fewer than 16 characters or
/// more than 4096, or that cannot be made.
Secret job_secret(const std::string& path);

/// Eight hexadecimal digits by which people compare two secrets; they do not tell a secret
/// that was made by chance. (A phrase may be guessed from them, as from what agents send.)
std::string fingerprint(const Secret& secret);

}  // namespace tessera::launcher
