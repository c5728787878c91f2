#include "parallel/checkpoint/rank_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/io/file.h"
#include "core/io/safetensors_header.h"
#include "parallel/checkpoint/exchange.h"

namespace tessera::checkpoint {
namespace {

// Dirty pages are handed to the disk while more are written: the final sync is then short, and the
// kernel never stops a training process for having too many.
constexpr uint64_t kFlushBytes = 32 << 20;
// A smaller file would consist mostly of the padding of its header and of its tail.
constexpr uint64_t kDirectBytes = 1 << 20;

std::string advice(int error) {
  return error == ENOENT ? "all hosts must see the same folder" : io::advice(error);
}

}  // namespace

RankFile::RankFile(std::string path, std::vector<io::TensorInfo> tensors,
                   const io::Metadata& metadata, uint64_t block_bytes)
    : path_(std::move(path)), tensors_(std::move(tensors)), block_bytes_(block_bytes) {
  uint64_t data_bytes = 0;
  for (const io::TensorInfo& t : tensors_) data_bytes += t.bytes;
  bool large = data_bytes >= kDirectBytes;
  std::string text = io::print_header(tensors_, metadata, large ? io::kDirectAlign : 8);
  uint64_t length = text.size(), end = 8 + length + data_bytes;
  // What is written must be readable, so the reader's own checks decide.
  size_t position = 0;
  auto source = [&](char* to, size_t room) {
    size_t n = text.copy(to, room, position);
    position += n;
    return n;
  };
  io::parse_header(source, length, end, fmt::format("checkpoint: {}", io::quote(path_)));
  TESSERA_CHECK(length <= io::kMaxHeaderBytes,
                "checkpoint: {}: the header would have {} bytes, at most {} are allowed; save from "
                "more ranks or shorten names",
                io::quote(path_), length, io::kMaxHeaderBytes);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("create", errno);
  std::string header(8, '\0');
  std::memcpy(header.data(), &length, 8);
  header += text;
  write_all(header.data(), header.size());
  if (large) go_direct();
  out_.entry = {.name = path_.substr(path_.rfind('/') + 1),
                .bytes = end,
                .header_bytes = header.size(),
                .header = io::xxh128(header.data(), header.size())};
  for (const io::TensorInfo& t : tensors_) out_.offsets.push_back(t.offset);
  out_.blocks.resize(tensors_.size());
}

RankFile::~RankFile() {
  if (fd_ >= 0) ::close(fd_);
}

void RankFile::fail(const char* what, int error) {
  throw UserError(
      fmt::format("checkpoint: cannot {} {} (after {} bytes): {}; {}; older saves are "
                  "unchanged",
                  what, io::quote(path_), written_, std::strerror(error), advice(error)));
}

void RankFile::write_all(const void* data, size_t bytes) {
  auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    ssize_t n = ::write(fd_, from, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && direct_) {  // some file systems refuse O_DIRECT only here
      leave_direct(EINVAL);
      continue;
    }
    if (n < 0) fail("write", errno);
    from += n;
    bytes -= size_t(n);
    written_ += uint64_t(n);
  }
  if (direct_ || written_ - flushed_ < kFlushBytes) return;
  // This is a hint; a disk that refuses bytes reports it at the sync.
  sync_file_range(fd_, off_t(flushed_), off_t(written_ - flushed_), SYNC_FILE_RANGE_WRITE);
  flushed_ = written_;
}

void RankFile::go_direct() {
  if (int error = io::set_direct(fd_, true))
    leave_direct(error);
  else
    direct_ = true;
}

void RankFile::leave_direct(int error) {
  direct_ = false;
  io::set_direct(fd_, false);
  if (error)
    out_.note = fmt::format("the file system of {} does not write past the page cache ({})",
                            io::quote(path_), std::strerror(error));
}

void RankFile::write(const std::byte* data, size_t bytes) {
  hash(data, bytes);
  bool aligned = reinterpret_cast<uintptr_t>(data) % io::kDirectAlign == 0;
  size_t direct = direct_ && aligned ? bytes / io::kDirectAlign * io::kDirectAlign : 0;
  if (direct) write_all(data, direct);
  if (direct == bytes) return;
  if (direct_) leave_direct(0);
  write_all(data + direct, bytes - direct);
}

void RankFile::hash(const std::byte* data, size_t bytes) {
  while (bytes > 0) {
    TESSERA_ASSERT(tensor_ < tensors_.size(), "{} bytes beyond the end of {}", bytes, path_);
    uint64_t whole = tensors_[tensor_].bytes;
    uint64_t block_end = std::min(whole, (in_tensor_ / block_bytes_ + 1) * block_bytes_);
    size_t n = size_t(std::min<uint64_t>(bytes, block_end - in_tensor_));
    block_.update(data, n);
    data += n, bytes -= n, in_tensor_ += n;
    if (in_tensor_ == block_end) end_block();
  }
}

void RankFile::end_block() {
  out_.blocks[tensor_].push_back(block_.digest());
  block_.reset();
  if (in_tensor_ < tensors_[tensor_].bytes) return;
  ++tensor_;
  in_tensor_ = 0;
}

WrittenFile RankFile::finish() {
  TESSERA_ASSERT(written_ == out_.entry.bytes, "{} has {} of {} bytes", path_, written_,
                 out_.entry.bytes);
  // What went through the page cache is waited for in parts, each of which counts as progress. As
  // above, this is a hint: errors are reported by the sync.
  for (uint64_t at = 0; at < flushed_; at += kFlushBytes) {
    sync_file_range(
        fd_, off_t(at), off_t(kFlushBytes),
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    got_on();
  }
  // A failed sync is final: the kernel may have dropped the pages, so that a second sync would
  // succeed without them.
  if (fsync(fd_) != 0) fail("sync", errno);
  if (::close(std::exchange(fd_, -1)) != 0) fail("close", errno);
  return std::move(out_);
}

void write_new_file(const std::string& path, std::string_view text) {
  auto fail = [&](const char* what, int error) {
    throw UserError(fmt::format("checkpoint: cannot {} {}: {}; {}; older saves are unchanged", what,
                                io::quote(path), std::strerror(error), advice(error)));
  };
  int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) fail("create", errno);
  int error = 0;
  while (!text.empty() && error == 0) {
    ssize_t n = ::write(fd, text.data(), text.size());
    if (n >= 0)
      text.remove_prefix(size_t(n));
    else if (errno != EINTR)
      error = errno;
  }
  bool written = error == 0;
  if (written && fsync(fd) != 0) error = errno;
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error) fail(written ? "sync" : "write", error);
}

}  // namespace tessera::checkpoint
