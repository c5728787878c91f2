// Reads boxes of tensors out of one saved step. Invariant: exactly the box asked for is written,
// and every block that a byte of it comes from was read as a whole and compared with its hash.
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
  uint64_t read = 0;    // from files: the blocks they lie in
};

class Reader {
 public:
  /// `manifest` of `folder` outlives the reader.
  Reader(std::string folder, const Manifest& manifest) : folder_(std::move(folder)), m_(manifest) {}

  /// Writes the elements `want` of `t`, dense, to `to`. Throws UserError naming file, range and
  /// tensor when bytes are missing or damaged; then what `to` holds is unspecified.
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
