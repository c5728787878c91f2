// Communication between the ranks of a save: short texts, and whether all went well. A rank that
// writes or reads files reports its progress, so its peers wait for a slow disk, but not for one
// that hangs. Invariant: a step that fails on one rank fails on all of them, with that rank's
// reason.
#pragma once
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "core/base/function_ref.h"

namespace tessera::checkpoint {

/// Reports progress of the calling thread's work on files; it must be called at least once for each
/// system call that may take long. It costs nothing outside of Exchange::together.
void got_on();

/// Exchanges texts over a group. Without a group there is one rank and nothing is sent.
class Exchange {
 public:
  /// `timeout` zero: that of the group's calls. `what` describes the work in together() when others
  /// wait for this rank: "saving into runs/a".
  Exchange(ProcessGroup* group, Millis timeout, std::string what = "reading or writing files")
      : group_(group), timeout_(timeout), what_(std::move(what)) {}
  int rank() const { return group_ ? group_->rank() : 0; }
  int size() const { return group_ ? group_->size() : 1; }

  /// Returns the texts of all ranks on rank 0, nothing on the others.
  std::vector<std::string> gather(const std::string& text);
  /// Returns the texts of all ranks on every rank.
  std::vector<std::string> all_gather(const std::string& text);
  /// Returns texts[r] of rank 0 on rank r.
  std::string scatter(const std::vector<std::string>& texts);
  std::string broadcast(const std::string& text);
  /// True when `here` is true on any rank.
  bool any(bool here);
  /// Runs `f` on each rank. When it throws UserError on some rank, throws UserError with the text
  /// of the lowest such rank on every rank. Other errors pass through at once.
  void together(FunctionRef<void()> f);
  /// Runs `f` on this rank as work that peers may have to wait for.
  void at_work(FunctionRef<void()> f);
  /// When an f of together() last made progress; zero while none runs. It may be called from any
  /// thread.
  std::chrono::steady_clock::time_point still_since() const {
    return std::chrono::steady_clock::time_point(
        std::chrono::steady_clock::duration(still_since_.load(std::memory_order_relaxed)));
  }

 private:
  friend void got_on();
  class Work;
  void tell_progress(bool at_work);

  ProcessGroup* group_;
  Millis timeout_;
  const std::string what_;
  std::atomic<std::chrono::steady_clock::rep> still_since_{0};
  std::chrono::steady_clock::time_point told_{};
};

/// Packs values into bytes for the same program on another rank.
class Packer {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T>
  void put(const T& value) { text_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void put(const std::string& s) {
    put(uint64_t(s.size()));
    text_ += s;
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};
class Unpacker {
 public:
  explicit Unpacker(const std::string& text) : text_(text) {}
  bool done() const { return at_ == text_.size(); }
  template <class T>
  T get() {
    T value;
    TESSERA_ASSERT(sizeof value <= text_.size() - at_, "a message of {} bytes is short",
                   text_.size());
    std::memcpy(&value, text_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string get_text() {
    auto size = get<uint64_t>();
    TESSERA_ASSERT(size <= text_.size() - at_, "a message of {} bytes is short", text_.size());
    std::string s = text_.substr(at_, size);
    at_ += size;
    return s;
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace tessera::checkpoint
