#include "tests/vgpu/nccl/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

namespace vgpu::nccl {

using tessera::nccl::UniqueId;

namespace {

struct Address {
  char magic[8];
  int process, descriptor;
  uint64_t number;  // of the segment in its process, which may use the descriptor's again
};
constexpr char kMagic[8] = "vgpuncl";

std::mutex descriptors_mutex;
// Those that this process made and has not closed, with the numbers of their segments.
std::map<int, uint64_t>& descriptors() {
  static auto* all = new std::map<int, uint64_t>;
  return *all;
}
uint64_t made = 0;

}  // namespace

bool Segment::make(UniqueId* id) {
  const int descriptor = memfd_create("vgpu-nccl", MFD_CLOEXEC);
  if (descriptor < 0) return false;
  std::lock_guard lock(descriptors_mutex);
  descriptors()[descriptor] = ++made;
  Address at{{}, getpid(), descriptor, made};
  std::memcpy(at.magic, kMagic, sizeof kMagic);
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->bytes, &at, sizeof at);
  return true;
}

std::shared_ptr<Segment> Segment::open(const UniqueId& id, int size) {
  Address at;
  std::memcpy(&at, id.bytes, sizeof at);
  if (std::memcmp(at.magic, kMagic, sizeof kMagic) != 0) return nullptr;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", at.process, at.descriptor);
  const int descriptor = ::open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  std::shared_ptr<Segment> s(new Segment(size));
  if (at.process == getpid()) s->descriptor_ = at.descriptor, s->number_ = at.number;
  const auto n = static_cast<size_t>(size);
  s->bytes_ = n * sizeof(RankArea) + n * n * sizeof(Channel);
  void* memory = MAP_FAILED;
  if (ftruncate(descriptor, static_cast<off_t>(s->bytes_)) == 0)
    memory = mmap(nullptr, s->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  if (memory == MAP_FAILED) return nullptr;
  s->memory_ = memory;
  s->ranks_ = static_cast<RankArea*>(memory);
  s->channels_ = reinterpret_cast<Channel*>(s->ranks_ + n);
  return s;
}

void Segment::close_descriptor() const {
  std::lock_guard lock(descriptors_mutex);
  const auto own = descriptors().find(descriptor_);
  if (own == descriptors().end() || own->second != number_) return;
  descriptors().erase(own);
  ::close(descriptor_);
}

Segment::~Segment() {
  close_descriptor();
  if (memory_) munmap(memory_, bytes_);
}

}  // namespace vgpu::nccl
