#include "core/backend/cuda/refusals.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <span>
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
  int graphs = 0;   // that write to it at each launch
};

Report read(const Report* word) {
  return std::atomic_ref(*const_cast<Report*>(word)).load(std::memory_order_relaxed);
}

std::string value_text(int64_t value) {
  if (value == std::numeric_limits<int32_t>::max()) return fmt::format("{} or more", value);
  if (value == std::numeric_limits<int32_t>::min()) return fmt::format("{} or less", value);
  return fmt::format("{}", value);
}

// A page of words at a time; none is ever given back.
class Pages {
 public:
  Report* new_word(int device) {
    std::lock_guard lock(mutex_);
    if (left_ == 0) {
      CurrentDevice current(device);
      void* page = nullptr;
      driver().host_allocate(&page, kPageBytes, unsigned(kHostAllocPortable));
      std::memset(page, 0, kPageBytes);
      next_ = static_cast<Report*>(page), left_ = kPageBytes / sizeof(Report);
    }
    --left_;
    return next_++;
  }

 private:
  std::mutex mutex_;
  Report* next_ = nullptr;
  size_t left_ = 0;
};
// Never destroyed: kernels may run until the process ends.
Pages& pages() {
  static Pages& all = *new Pages;
  return all;
}

}  // namespace

// What ops of one thread refused, on any of its streams. A program has few different ops that
// refuse, so its words are searched one by one; where sizes differ from call to call the list is
// cut short.
class Refusals::Words {
 public:
  void add(const Stream& stream) {
    std::lock_guard lock(mutex_);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end())
      streams_.push_back(stream);
  }

  Report* launch(const Stream& stream, const Refusal& r) {
    std::lock_guard lock(mutex_);
    for (Word& w : words_)
      if (w.refusal.text == r.text && w.refusal.op == r.op && w.refusal.a == r.a &&
          w.refusal.b == r.b) {
        if (read(w.at) == 0) w.launch = ++launches_;
        return w.at;
      }
    if (words_.size() == kMostWords) cut_short();
    Report* at = nullptr;
    if (free_.empty()) {
      at = pages().new_word(stream.device.index);
    } else {
      at = free_.back();
      free_.pop_back();
    }
    words_.push_back({r, at, ++launches_});
    return at;
  }

  // A launch that is captured: only launches of the graph can refuse anything.
  Report* capture(const Stream& stream, const Refusal& r) {
    Report* at = launch(stream, r);
    std::lock_guard lock(mutex_);
    ++word_at(at).graphs;
    return at;
  }
  // The graph is launched: these are its words, in order.
  void launch_again(std::span<Report* const> words) {
    std::lock_guard lock(mutex_);
    for (Report* at : words)
      if (read(at) == 0) word_at(at).launch = ++launches_;
  }
  void let_go(std::span<Report* const> words) {
    std::lock_guard lock(mutex_);
    for (Report* at : words) --word_at(at).graphs;
  }

  // What was refused first, as a text; empty where nothing was. Where the own thread asks, it is
  // forgotten once all that may still refuse has run.
  std::string take(bool own) {
    std::lock_guard lock(mutex_);
    if (std::ranges::none_of(words_, [](const Word& w) { return read(w.at) != 0; })) return {};
    if (own) wait_for_streams();
    const Word* first = nullptr;
    int refused = 0;
    for (const Word& w : words_) {
      if (read(w.at) == 0) continue;
      ++refused;
      if (!first || w.launch < first->launch) first = &w;
    }
    const Refused what = refused_of(read(first->at));
    std::string text =
        fmt::format(fmt::runtime(first->refusal.text), first->refusal.op, value_text(what.value),
                    what.position, first->refusal.a, first->refusal.b);
    if (refused > 1) text += fmt::format(" ({} ops after it refused operands too)", refused - 1);
    if (own) {
      for (const Word& w : words_) std::atomic_ref(*w.at).store(0, std::memory_order_relaxed);
      last_ = text, thrown_.fetch_add(1);
    }
    return text;
  }

  uint32_t thrown() const { return thrown_.load(); }
  std::string last() {
    std::lock_guard lock(mutex_);
    return last_;
  }

 private:
  static constexpr size_t kMostWords = 256;

  void wait_for_streams() {
    for (const Stream& s : streams_) {
      CurrentDevice current(s.device.index);
      driver().stream_synchronize(handle_of(s));
    }
  }
  Word& word_at(Report* at) { return *std::ranges::find(words_, at, &Word::at); }
  // Frees the words of launches that have refused nothing, once all of them have run.
  void cut_short() {
    wait_for_streams();
    std::erase_if(words_, [&](const Word& w) {
      const bool unused = read(w.at) == 0 && w.graphs == 0;
      if (unused) free_.push_back(w.at);
      return unused;
    });
  }

  std::mutex mutex_;
  std::vector<Word> words_;
  std::vector<Report*> free_;
  std::vector<Stream> streams_;
  uint64_t launches_ = 0;
  std::string last_;  // what the own thread was told last
  std::atomic<uint32_t> thrown_{0};
};

Refusals::Refusals() : words_(std::make_unique<Words>()) {}
Refusals::~Refusals() = default;

namespace {

// Maps each stream that a thread has taken, by its handle, to the refusals of that thread.
struct Owners {
  std::mutex mutex;
  std::unordered_map<void*, Ref<Refusals>> of_stream;
};
Owners& owners() {
  static Owners& all = *new Owners;
  return all;
}

const Ref<Refusals>& own_refusals() {
  thread_local const Ref<Refusals> own = make_ref<Refusals>();
  return own;
}

}  // namespace

void own_stream(const Stream& stream) {
  own_refusals()->words().add(stream);
  std::lock_guard lock(owners().mutex);
  owners().of_stream[stream.handle] = own_refusals();
}

Ref<Refusals> refusals_of(const Stream& stream) {
  std::lock_guard lock(owners().mutex);
  const auto found = owners().of_stream.find(stream.handle);
  return found == owners().of_stream.end() ? nullptr : found->second;
}

uint32_t Refusals::thrown() const { return words_->thrown(); }

void Refusals::post(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  error_ = std::move(error);
  posted_.store(true, std::memory_order_release);
}

void Refusals::raise(uint32_t seen) {
  const bool own = this == own_refusals().get();
  if (own && posted_.load(std::memory_order_acquire)) [[unlikely]] {
    std::lock_guard lock(mutex_);
    posted_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(error_);
  }
  std::string text = words_->take(own);
  if (text.empty() && !own && words_->thrown() != seen) text = words_->last();
  if (text.empty()) return;
  throw UserError(text +
                  "; the op ran earlier, and what was computed since then is wrong: go on from a "
                  "checkpoint (TESSERA_CUDA_SYNCHRONOUS=1 throws where the op is called)");
}

bool synchronous() {
  static const bool on = env::get_int("TESSERA_CUDA_SYNCHRONOUS", 0, 0, 1) == 1;
  return on;
}

RefusalWord::RefusalWord(const Stream& stream, const Refusal& refusal) : stream_(stream) {
  if (GraphRefusals* graph = GraphRefusals::captured()) {
    word_ = graph->add(stream, refusal);
    return;
  }
  word_ = own_refusals()->words().launch(stream, refusal);
  if (read(word_) != 0) [[unlikely]]
    own_refusals()->raise(own_refusals()->thrown());
}

namespace {
thread_local GraphRefusals* captured_refusals = nullptr;
}

GraphRefusals::GraphRefusals() : of_(own_refusals()) {}
GraphRefusals::~GraphRefusals() { of_->words().let_go(words_); }
GraphRefusals* GraphRefusals::captured() { return captured_refusals; }
GraphRefusals::Scope::Scope(GraphRefusals& graph) { captured_refusals = &graph; }
GraphRefusals::Scope::~Scope() { captured_refusals = nullptr; }
Report* GraphRefusals::add(const Stream& stream, const Refusal& refusal) {
  words_.push_back(of_->words().capture(stream, refusal));
  return words_.back();
}
void GraphRefusals::launches() {
  if (words_.empty()) return;
  if (std::ranges::any_of(words_, [](const Report* w) { return read(w) != 0; })) [[unlikely]]
    of_->raise(of_->thrown());
  of_->words().launch_again(words_);
}

void RefusalWord::launched() const {
  if (synchronous()) wait();
}

void RefusalWord::wait() const {
  note_host_wait();
  CurrentDevice current(stream_.device.index);
  driver().stream_synchronize(handle_of(stream_));
  if (const std::string text = own_refusals()->words().take(true); !text.empty())
    throw UserError(text);
}

void raise_refusals(const Stream& stream) {
  if (const Ref<Refusals> of = refusals_of(stream)) of->raise(of->thrown());
}

}  // namespace tessera::cuda
