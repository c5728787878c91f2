#include "parallel/checkpoint/pages.h"

#include <sys/mman.h>

#include <cstdint>

#include "core/base/error.h"

namespace tessera::checkpoint {

Pages::Pages(size_t bytes) : mapped_bytes_(bytes + kHugePageBytes) {
  void* p =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TESSERA_CHECK(p != MAP_FAILED,
                "checkpoint: no memory for a buffer of {} bytes; lower staging_bytes", bytes);
  mapped_ = p;
  bytes_ = bytes;
  data_ = static_cast<std::byte*>(p) + size_t(-reinterpret_cast<uintptr_t>(p)) % kHugePageBytes;
  madvise(data_, bytes_, MADV_HUGEPAGE);  // only a hint: small pages will do
}

Pages::~Pages() {
  if (mapped_) munmap(mapped_, mapped_bytes_);
}

}  // namespace tessera::checkpoint
