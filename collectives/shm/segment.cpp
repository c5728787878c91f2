#include "collectives/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace tessera::detail {
namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

void SharedText::write(std::string_view text) {
  uint64_t v = version_.load(std::memory_order_relaxed);
  version_.store(v + 1, std::memory_order_seq_cst);
  for (size_t w = 0; w < kWords; ++w) {
    char part[8] = {};
    if (w * 8 < text.size())
      std::memcpy(part, text.data() + w * 8, std::min<size_t>(8, text.size() - w * 8));
    uint64_t word;
    std::memcpy(&word, part, 8);
    words_[w].store(word, std::memory_order_seq_cst);
  }
  version_.store(v + 2, std::memory_order_seq_cst);
}

std::string SharedText::read() const {
  char text[kWords * 8 + 1] = {};
  for (int attempt = 0; attempt < 100; ++attempt) {
    uint64_t v = version_.load(std::memory_order_seq_cst);
    for (size_t w = 0; w < kWords; ++w) {
      uint64_t word = words_[w].load(std::memory_order_seq_cst);
      std::memcpy(text + w * 8, &word, 8);
    }
    if (v % 2 == 0 && version_.load(std::memory_order_seq_cst) == v) break;
  }
  return text;
}

Segment::Segment(int size, const Options& options) : size_(size), options_(options) {
  size_t at = round_up(sizeof(Header), 4096);
  auto place = [&](size_t bytes) {
    size_t here = at;
    at = round_up(at + bytes, 4096);
    return here;
  };
  size_t n = size_t(size);
  TESSERA_CHECK(options.stage_bytes >= std::max(kInlineBytes, n * kLineBytes),
                "shm: staging areas of {} bytes are too small for {} ranks; make stage_bytes at "
                "least {}",
                options.stage_bytes, size, std::max(kInlineBytes, n * kLineBytes));
  size_t states = place(n * sizeof(RankState)), boxes = place(n * n * sizeof(Mailbox));
  size_t splits = place(n * 4 * n * sizeof(int64_t));
  size_t places = place(n * 2 * (n + 1) * sizeof(int64_t));
  size_t swaps = place(2 * n * kSwapBytes);
  size_t stages = place(2 * n * options.stage_bytes);
  size_t mail = place(n * n * 2 * options.mail_bytes);
  bytes_ = at;
  // These are offsets for now; map() adds the base.
  states_ = reinterpret_cast<RankState*>(states);
  mailboxes_ = reinterpret_cast<Mailbox*>(boxes);
  splits_ = reinterpret_cast<int64_t*>(splits);
  places_ = reinterpret_cast<int64_t*>(places);
  swaps_ = reinterpret_cast<std::byte*>(swaps);
  stages_ = reinterpret_cast<std::byte*>(stages);
  mail_ = reinterpret_cast<std::byte*>(mail);
}

void Segment::map(int fd, bool fresh) {
  int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw UserError(fmt::format("shm: cannot map {} bytes: {}; free some memory", bytes_,
                                std::strerror(errno)));
  }
  auto* base = static_cast<std::byte*>(base_);
  auto move = [&]<class T>(T*& p) { p = reinterpret_cast<T*>(base + reinterpret_cast<size_t>(p)); };
  move(states_);
  move(mailboxes_);
  move(splits_);
  move(places_);
  move(swaps_);
  move(stages_);
  move(mail_);
  if (!fresh) return;
  new (base_) Header;
  for (int r = 0; r < size_; ++r) new (&states_[r]) RankState;
  for (int b = 0; b < size_ * size_; ++b) new (&mailboxes_[b]) Mailbox;
}

std::shared_ptr<Segment> Segment::make_private(int size, const Options& options) {
  std::shared_ptr<Segment> s(new Segment(size, options));
  s->map(-1, true);
  return s;
}

std::shared_ptr<Segment> Segment::make_shared(int size, const Options& options) {
  std::shared_ptr<Segment> s(new Segment(size, options));
  rlimit files{};
  getrlimit(RLIMIT_FSIZE, &files);
  TESSERA_CHECK(files.rlim_cur >= s->bytes_,  // the system would send a signal
                "shm: cannot make shared memory of {} bytes: files are limited to {} bytes "
                "(ulimit -f); raise that, or set TESSERA_BACKEND=gloo",
                s->bytes_, files.rlim_cur);
  s->fd_ = memfd_create("tessera", MFD_CLOEXEC);
  TESSERA_CHECK(s->fd_ >= 0 && ftruncate(s->fd_, off_t(s->bytes_)) == 0,
                "shm: cannot make shared memory of {} bytes: {}; set TESSERA_BACKEND=gloo",
                s->bytes_, std::strerror(errno));
  s->map(s->fd_, true);
  return s;
}

std::shared_ptr<Segment> Segment::attach(const std::string& address, int size,
                                         const Options& options) {
  std::shared_ptr<Segment> s(new Segment(size, options));
  int fd = open(address.c_str(), O_RDWR | O_CLOEXEC);
  TESSERA_CHECK(fd >= 0,
                "shm: cannot open the group's memory {}: {}; run all ranks as one user in one "
                "container, or set TESSERA_BACKEND=gloo",
                address, std::strerror(errno));
  try {
    s->map(fd, false);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  return s;
}

std::string Segment::address() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_); }

void Segment::close_descriptor() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Segment::~Segment() {
  if (base_) munmap(base_, bytes_);
  close_descriptor();
}

std::shared_ptr<Segment> Hub::join(const std::string& group, int size,
                                   const Segment::Options& options) {
  std::lock_guard lock(mutex_);
  Meeting& m = meetings_[group];
  if (!m.segment) m.segment = Segment::make_private(size, options);
  std::shared_ptr<Segment> segment = m.segment;
  if (++m.joined == size) meetings_.erase(group);
  return segment;
}

}  // namespace tessera::detail
