// Reads saved steps back and compares every byte with the hashes of the manifest. Invariant: bytes
// that differ from those written, are missing or are too many give a finding with file and range,
// and with the tensor where there is one.
#pragma once
#include <string>
#include <vector>

#include "parallel/checkpoint/manifest.h"
#include "parallel/checkpoint/pages.h"

namespace tessera::checkpoint {

struct Finding {
  std::string file;             // path
  uint64_t begin = 0, end = 0;  // its bytes; equal where the whole file is meant
  std::string tensor;           // name and box; empty where no tensor is affected
  std::string what;
};
/// "'dir/rank-0000-of-0001.safetensors' bytes [128, 4096), tensor 'a'[0:4]: ...".
std::string to_string(const Finding& f);

struct Verified {
  std::vector<Finding> findings;  // none: sound
  std::vector<int64_t> steps;     // the steps that were checked
  uint64_t bytes = 0;             // read
};

/// Verifies `path`: the folder of one step, or a folder of steps with `latest` and every step.
/// Throws UserError when there is nothing to verify.
Verified verify(const std::string& path);
/// Verifies one file of a step, which is read through `window`, and from disk where the system can
/// be asked to drop its cached pages. Appends to `out`.
void verify_file(const std::string& folder, const Manifest& manifest, size_t file, Pages& window,
                 Verified& out);
inline constexpr size_t kWindowBytes = 8 << 20;  // gives a disk its full speed

}  // namespace tessera::checkpoint
