// What the user sees of the workers' output. With several ranks each line gets the prefix `[rank1]
// `, and lines of different ranks are never mixed: a line is printed when it is complete. The
// exception is an interactive stream, which is rank 0's when tlaunch's own output is a terminal:
// its bytes are printed at once, with a prefix after each line break or carriage return, so a
// progress bar redraws in place; when another rank prints, the bar's line is erased first and the
// bar comes back with its next redraw. The bytes of a single rank pass through unchanged.
// Invariant: bytes are printed in order, unless the reader has gone or an error is reported; only
// flush() blocks.
#pragma once
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::launcher {

class Console {
 public:
  /// `prefix`: whether each line names its rank, and `host`, where it is not empty: "[node1 rank3]
  /// ".
  explicit Console(bool prefix, std::string host = "");

  /// Takes bytes from stream 0 (stdout) or 1 (stderr) of a rank.
  void write(int rank, int stream, bool interactive, std::string_view bytes);
  /// Called when the stream has ended: prints the rest of a last line without a line break.
  void end(int rank, int stream);
  /// Prints a message of tlaunch's own, on stderr, on lines of its own.
  void note(const std::string& text);

  /// The number of lines taken so far, on both streams.
  long lines() const { return line_count_; }
  /// Whether stdout and stderr are one terminal, file or pipe.
  bool one_place() const { return one_place_; }
  /// The number of bytes not yet written to stdout (0) or stderr (1).
  size_t pending(int stream) const { return out_[stream].size() - sent_[stream]; }
  /// Whether output was lost because of an error, which a note has reported; a reader that left is
  /// no error.
  bool lost() const { return lost_; }
  /// Writes what can be written without blocking.
  void pump(int stream);
  /// Writes everything, waiting for the reader for at most `timeout_ms` without progress, or until
  /// `stop_fd` can be read.
  void flush(int timeout_ms, int stop_fd);

 private:
  using Source = std::pair<int, int>;  // rank, stream
  struct Line {
    std::string held;      // not interactive: an incomplete line
    bool started = false;  // interactive: the prefix of this line is out
    bool redraw = false;   // interactive: this line began with a carriage return
  };

  void write_interactive(Source source, Line& line, std::string_view bytes);
  void make_room(Source source, int stream);
  void put(int stream, std::string_view bytes);
  bool send(int stream);
  std::string prefix(int rank) const;

  const bool prefix_;
  const std::string host_;
  const bool one_place_;
  long line_count_ = 0;
  std::array<bool, 2> is_terminal_;
  std::array<bool, 2> gone_{};  // nothing can be written there any more
  bool lost_ = false;
  std::array<std::string, 2> out_;
  std::array<size_t, 2> sent_{};
  std::map<Source, Line> lines_;
  Source open_{-1, 0};  // the source whose unfinished line the cursor is in
  bool at_line_start_ = true;
};

}  // namespace tessera::launcher
