// Reads boxes of tensors from one saved step. Invariant: exactly the box asked for is written, and
// every block that one of its bytes comes from was read as a whole and compared with its hash.
// Internal: not part of the public interface.
#pragma once
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/io/file.h"
#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {

namespace detail {
struct Run;
class BlockCheck;
}  // namespace detail

struct ReadCost {
  uint64_t wanted = 0;  // bytes asked for
  uint64_t read = 0;    // read from files: the blocks that hold them
};

class Reader {
 public:
  /// `manifest` is that of `folder` and must outlive the reader.
  Reader(std::string folder, const Manifest& manifest) : folder_(std::move(folder)), m_(manifest) {}

  /// Writes the elements `want` of `t`, dense, to `to`. Throws UserError that names file, range and
  /// tensor when bytes are missing or damaged; the contents of `to` are then unspecified.
  void fill(const TensorEntry& t, const Box& want, std::byte* to);
  const ReadCost& cost() const { return cost_; }

 private:
  const io::File& open(uint32_t index);
  void read(const io::File& file, const Chunk& c, uint64_t chunk_bytes,
            std::span<const detail::Run> runs, detail::BlockCheck& check);
  void through_scratch(const io::File& file, std::span<const detail::Run> runs, uint64_t begin,
                       uint64_t end, detail::BlockCheck& check);
  std::string folder_;
  const Manifest& m_;
  ReadCost cost_;
  std::map<uint32_t, io::File> files_;
  std::vector<std::byte> scratch_;
};

}  // namespace tessera::checkpoint
