// Choices that cost time to make, since candidates are timed, kept on disk for other processes of
// such a machine. Invariant: once one is kept, all processes that ask compute the same, until it is
// replaced.
// Internal: not part of the public interface.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "core/io/object_cache.h"

namespace tessera::io {

/// Thread-safe. Where the disk cannot be used, each process makes its own choices, and the log says
/// so.
class TunedChoices {
 public:
  /// `suffix` and `who` as of ObjectCache; `what` is chosen: "products".
  TunedChoices(std::string suffix, std::string who, std::string what);

  /// The key of what `text` describes: all that the choice depends on, the machine too.
  static std::string key_of(std::string_view text);
  std::optional<std::string> find(const std::string& key) const;
  /// Keeps `mine`, or returns what another process has kept meanwhile. Nobody waits for others that
  /// measure: what runs before the candidates in a stream may be a collective in which those who
  /// wait take part.
  std::string keep(const std::string& key, const std::string& mine) const;
  /// Keeps `choice` in place of another one that is kept.
  void replace(const std::string& key, const std::string& choice) const;

 private:
  ObjectCache disk() const { return {"", suffix_, who_}; }
  std::string suffix_, who_, what_;
};

}  // namespace tessera::io
