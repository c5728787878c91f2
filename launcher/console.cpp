#include "launcher/console.h"

#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tessera::launcher {
namespace {

constexpr size_t kLongLine = 64 << 10;  // a longer line is printed in pieces
constexpr std::pair<int, int> kNobody{-1, 0};

int fd_of(int stream) { return stream + 1; }

bool writable(int fd, int timeout_ms, int stop_fd = -1) {
  pollfd p[2] = {{fd, POLLOUT, 0}, {stop_fd, POLLIN, 0}};
  return ::poll(p, 2, timeout_ms) > 0 && p[0].revents != 0;
}

bool same_file(int a, int b) {
  struct stat x {
  }, y{};
  return ::fstat(a, &x) == 0 && ::fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

}  // namespace

Console::Console(bool prefix, std::string host)
    : prefix_(prefix),
      host_(std::move(host)),
      one_place_(same_file(1, 2)),
      is_terminal_{::isatty(1) == 1, ::isatty(2) == 1} {}

std::string Console::prefix(int rank) const {
  return (host_.empty() ? "[rank" : "[" + host_ + " rank") + std::to_string(rank) + "] ";
}

void Console::put(int stream, std::string_view bytes) {
  if (bytes.empty() || gone_[stream]) return;
  out_[stream].append(bytes);
  line_count_ += std::ranges::count(bytes, '\n');
  at_line_start_ = bytes.back() == '\n';
}

// Ends or erases the unfinished line of another source before `source` prints.
void Console::make_room(Source source, int stream) {
  if (open_ == kNobody || open_ == source) return;
  Line& line = lines_[open_];
  bool wipe = line.redraw && is_terminal_[stream];
  put(stream, wipe ? "\r\x1b[K" : "\n");
  line.started = false;
  open_ = kNobody;
}

void Console::write_interactive(Source source, Line& line, std::string_view bytes) {
  while (!bytes.empty()) {
    size_t end = bytes.find_first_of("\r\n");
    std::string_view text = bytes.substr(0, end);
    if (!text.empty()) {
      make_room(source, source.second);
      if (!line.started) put(source.second, prefix(source.first));
      line.started = true;
      open_ = source;
      put(source.second, text);
    }
    if (end == std::string_view::npos) return;
    bool redraw = bytes[end] == '\r' && bytes.substr(end, 2) != "\r\n";
    if (bytes[end] == '\n' || redraw) {
      if (bytes[end] == '\n' || open_ == source) put(source.second, bytes.substr(end, 1));
      if (bytes[end] == '\n') open_ = kNobody;
      line.started = false;
      line.redraw = redraw;
    }
    bytes.remove_prefix(end + 1);
  }
}

void Console::write(int rank, int stream, bool interactive, std::string_view bytes) {
  if (!prefix_) return put(stream, bytes);
  Source source{rank, stream};
  Line& line = lines_[source];
  if (interactive) return write_interactive(source, line, bytes);
  line.held.append(bytes);
  size_t begin = 0;
  for (size_t end; (end = line.held.find('\n', begin)) != std::string::npos; begin = end + 1) {
    make_room(source, stream);
    put(stream, prefix(rank));
    put(stream, std::string_view(line.held).substr(begin, end + 1 - begin));
  }
  line.held.erase(0, begin);
  if (line.held.size() > kLongLine) {
    make_room(source, stream);
    put(stream, prefix(rank) + line.held + "\n");
    line.held.clear();
  }
}

void Console::end(int rank, int stream) {
  Source source{rank, stream};
  auto found = lines_.find(source);
  if (found == lines_.end()) return;
  if (!found->second.held.empty()) {
    make_room(source, stream);
    put(stream, prefix(rank) + found->second.held + "\n");
  }
  if (open_ == source) {
    put(stream, "\n");
    open_ = kNobody;
  }
  lines_.erase(found);
}

void Console::note(const std::string& text) {
  if (open_ != kNobody)
    make_room(kNobody, 1);
  else if (!at_line_start_)
    put(1, "\n");
  put(1, text);
  if (!text.empty() && text.back() != '\n') put(1, "\n");
}

// Writes one piece; false when nothing is left or the reader has gone. A descriptor that polls as
// writable takes PIPE_BUF bytes without blocking; its flags are not changed, because the shell
// shares them.
bool Console::send(int stream) {
  std::string& out = out_[stream];
  size_t& sent = sent_[stream];
  ssize_t n =
      ::write(fd_of(stream), out.data() + sent, std::min<size_t>(out.size() - sent, PIPE_BUF));
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
  if (n < 0) {
    const int why = errno;
    gone_[stream] = true;
    out.clear();
    sent = 0;
    if (why == EPIPE || (why == EIO && is_terminal_[stream])) return false;  // the reader has gone
    lost_ = true;
    note(std::string("tlaunch: ") + (stream == 0 ? "standard output" : "standard error") +
         ": cannot write it: " + std::strerror(why) + "; what the ranks print there is lost");
    return false;
  }
  sent += size_t(n);
  if (sent == out.size()) {
    out.clear();
    sent = 0;
    return false;
  }
  return true;
}

void Console::pump(int stream) {
  while (pending(stream) > 0 && writable(fd_of(stream), 0))
    if (!send(stream)) return;
}

void Console::flush(int timeout_ms, int stop_fd) {
  for (int stream : {0, 1})
    while (pending(stream) > 0 && writable(fd_of(stream), timeout_ms, stop_fd))
      if (!send(stream)) break;
}

}  // namespace tessera::launcher
