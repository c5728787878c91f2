// The key that identifies a call of a compiled function: a list of words, compared in one sweep.
// Extents are kept apart from the rest, so that calls that differ only in sizes are recognised.
// Invariant: calls with equal keys run the same ops on memory that they find in the same places.
// Internal: not part of the public interface.
#pragma once
#include <bit>
#include <cstring>
#include <string_view>

#include "core/base/small_vector.h"

namespace tessera::compiler {

class CallKey {
 public:
  void add(uint64_t word) { kind_.push_back(word); }
  void add(std::string_view text) {
    add(text.size());
    for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
      add(word);
    }
  }
  /// Adds a number, together with its type.
  template <class T>
  void add_number(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a number of at most 64 bits");
    add(uint64_t(reinterpret_cast<uintptr_t>(&kType<T>)));
    if constexpr (std::is_floating_point_v<T>)
      add(std::bit_cast<uint64_t>(double(value)));
    else
      add(uint64_t(value));
  }
  void add_extent(int64_t n) { extents_.push_back(n); }

  bool operator==(const CallKey& o) const { return extents_ == o.extents_ && kind_ == o.kind_; }
  /// True for keys that are equal but for extents.
  bool same_kind(const CallKey& o) const { return kind_ == o.kind_; }
  const SmallVector<int64_t, 16>& extents() const { return extents_; }

 private:
  template <class T>
  static inline const char kType = 0;  // its address stands for T

  SmallVector<uint64_t, 48> kind_;
  SmallVector<int64_t, 16> extents_;
};

}  // namespace tessera::compiler
