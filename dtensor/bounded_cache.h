// A cache of bounded size for what is looked up before every op. It has two generations: new
// entries go into the young one; when that is full, the old one is dropped and the young one
// becomes old; an old entry that is found again moves to the young one. So entries in use stay,
// without a list in order of use. Invariant: an entry keeps its address, and lives at least until
// `kCapacity` others are made after its last use.
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

namespace tessera {

template <class Entry>
class BoundedCache {
 public:
  /// The number of entries in one generation; there are at most twice as many in all.
  static constexpr size_t kCapacity = 4096;

  /// Returns the entry with this hash for which `matches(entry)` holds; null when there is none.
  template <class F>
  Entry* find(uint64_t hash, F matches) {
    auto [first, last] = young_.equal_range(hash);
    for (auto it = first; it != last; ++it)
      if (matches(std::as_const(*it->second))) return it->second.get();
    auto [old_first, old_last] = old_.equal_range(hash);
    for (auto it = old_first; it != old_last; ++it)
      if (matches(std::as_const(*it->second))) {
        std::unique_ptr<Entry> entry = std::move(it->second);
        old_.erase(it);
        return &add(hash, std::move(entry));
      }
    return nullptr;
  }
  Entry& add(uint64_t hash, std::unique_ptr<Entry> entry) {
    if (young_.size() == kCapacity) old_ = std::exchange(young_, {});
    return *young_.emplace(hash, std::move(entry))->second;
  }
  size_t size() const { return young_.size() + old_.size(); }

 private:
  using Generation = std::unordered_multimap<uint64_t, std::unique_ptr<Entry>>;
  Generation young_, old_;
};

}  // namespace tessera
