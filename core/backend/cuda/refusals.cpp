#include "core/backend/cuda/refusals.h"

#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/stream.h"
#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr size_t kPageBytes = 4096;

struct Word {
  Refusal refusal;
  Report* at;
  uint64_t launch;  // number of the latest
};

Report read(const Report* word) {
  return std::atomic_ref(*const_cast<Report*>(word)).load(std::memory_order_relaxed);
}

std::string value_text(int64_t value) {
  if (value == std::numeric_limits<int32_t>::max()) return fmt::format("{} or more", value);
  if (value == std::numeric_limits<int32_t>::min()) return fmt::format("{} or less", value);
  return fmt::format("{}", value);
}

// A program has few different ops that refuse, so those of a stream are searched one by one.
class Words {
 public:
  Report* launch(const Stream& stream, const Refusal& r) {
    std::lock_guard lock(mutex_);
    auto& words = of_stream_[stream.handle];
    for (Word& w : words)
      if (w.refusal.text == r.text && w.refusal.op == r.op && w.refusal.a == r.a &&
          w.refusal.b == r.b) {
        if (read(w.at) == 0) w.launch = ++launches_;
        return w.at;
      }
    words.push_back({r, new_word(), ++launches_});
    return words.back().at;
  }

  void share(const Stream& side, const Stream& compute) {
    std::lock_guard lock(mutex_);
    shared_[side.handle] = compute;
  }

  /// What was refused first on `stream`, as a text; empty where nothing was.
  std::string take(const Stream& stream) {
    std::lock_guard lock(mutex_);
    const auto shared = shared_.find(stream.handle);
    const Stream& compute = shared == shared_.end() ? stream : shared->second;
    const auto found = of_stream_.find(compute.handle);
    if (found == of_stream_.end()) return {};
    const Word* first = nullptr;
    int refused = 0;
    for (const Word& w : found->second) {
      if (read(w.at) == 0) continue;
      ++refused;
      if (!first || w.launch < first->launch) first = &w;
    }
    if (!first) return {};
    const Refused what = refused_of(read(first->at));
    std::string text =
        fmt::format(fmt::runtime(first->refusal.text), first->refusal.op, value_text(what.value),
                    what.position, first->refusal.a, first->refusal.b);
    if (refused > 1) text += fmt::format(" ({} ops after it refused operands too)", refused - 1);
    if (is_own_compute_stream(compute))
      for (const Word& w : found->second)
        std::atomic_ref(*w.at).store(0, std::memory_order_relaxed);
    return text;
  }

 private:
  Report* new_word() {
    if (left_ == 0) {
      CurrentDevice current(0);
      void* page = nullptr;
      driver().host_allocate(&page, kPageBytes, unsigned(kHostAllocPortable));
      std::memset(page, 0, kPageBytes);
      next_ = static_cast<Report*>(page), left_ = kPageBytes / sizeof(Report);
    }
    --left_;
    return next_++;
  }

  std::mutex mutex_;
  std::unordered_map<void*, std::vector<Word>> of_stream_;  // by handle
  std::unordered_map<void*, Stream> shared_;                // by handle of the side stream
  uint64_t launches_ = 0;
  Report* next_ = nullptr;
  size_t left_ = 0;  // words of the page
};

// Never destroyed: kernels may run until the process ends.
Words& words() {
  static Words& all = *new Words;
  return all;
}

}  // namespace

bool synchronous() {
  static const bool on = env::get_int("TESSERA_CUDA_SYNCHRONOUS", 0, 0, 1) == 1;
  return on;
}

RefusalWord::RefusalWord(const Stream& stream, const Refusal& refusal)
    : stream_(stream), word_(words().launch(stream, refusal)) {
  if (read(word_) != 0) [[unlikely]]
    raise_refusals(stream);
}

void RefusalWord::launched() const {
  if (synchronous()) wait();
}

void RefusalWord::wait() const {
  note_host_wait();
  CurrentDevice current(stream_.device.index);
  driver().stream_synchronize(handle_of(stream_));
  if (const std::string text = words().take(stream_); !text.empty()) throw UserError(text);
}

void share_refusals(const Stream& side, const Stream& compute) { words().share(side, compute); }

void raise_refusals(const Stream& stream) {
  const std::string text = words().take(stream);
  if (text.empty()) return;
  throw UserError(text +
                  "; the op ran earlier, and what was computed since then is wrong: go on from a "
                  "checkpoint (TESSERA_CUDA_SYNCHRONOUS=1 throws where the op is called)");
}

}  // namespace tessera::cuda
