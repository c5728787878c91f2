// Memory that disks write to and read from without a copy. Invariant: it begins at a huge page and
// consists of huge pages as far as it fills them and the system has some. A disk takes one segment
// per page, so with small pages one transfer becomes many.
#pragma once
#include <cstddef>
#include <utility>

namespace tessera::checkpoint {

inline constexpr size_t kHugePageBytes = 2 << 20;

class Pages {
 public:
  Pages() = default;
  /// Allocates at least `bytes` of zeros. Throws UserError when the system has no such memory.
  explicit Pages(size_t bytes);
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Pages();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Pages& other) {
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tessera::checkpoint
