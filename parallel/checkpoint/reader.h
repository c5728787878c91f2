// Reads boxes of tensors out of one saved step. Invariant: exactly the box asked for is written,
// and every block whose bytes all came by on the way was compared with its hash.
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
  uint64_t wanted = 0;    // bytes asked for
  uint64_t read = 0;      // from files
  uint64_t verified = 0;  // of whole blocks, which were compared with their hashes
};

class Reader {
 public:
  /// `manifest` of `folder` outlives the reader. `verify_all`: blocks that are touched are read as
  /// a whole, so that all are compared.
  Reader(std::string folder, const Manifest& manifest, bool verify_all)
      : folder_(std::move(folder)), m_(manifest), verify_all_(verify_all) {}

  /// Writes the elements `want` of `t`, dense, to `to`. Throws UserError naming file, range and
  /// tensor when bytes are missing or damaged; then what `to` holds is unspecified.
  void fill(const TensorEntry& t, const Box& want, std::byte* to);
  const ReadCost& cost() const { return cost_; }

 private:
  const io::File& open(uint32_t index);
  void read(const io::File& file, const TensorEntry& t, const Chunk& c,
            std::span<const detail::Run> runs, detail::BlockCheck& check);
  void through_scratch(const io::File& file, std::span<const detail::Run> runs, uint64_t begin,
                       uint64_t end, detail::BlockCheck& check);
  std::string folder_;
  const Manifest& m_;
  bool verify_all_;
  ReadCost cost_;
  std::map<uint32_t, io::File> files_;
  std::vector<std::byte> scratch_;
};

}  // namespace tessera::checkpoint
