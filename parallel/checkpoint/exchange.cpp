#include "parallel/checkpoint/exchange.h"

#include <algorithm>

namespace tessera::checkpoint {
namespace {

Tensor bytes_of(const std::string& text, int64_t room) {
  Tensor t = empty({room}, kU8);
  if (!text.empty()) std::memcpy(t.raw(), text.data(), text.size());
  std::memset(static_cast<char*>(t.raw()) + text.size(), 0, size_t(room) - text.size());
  return t;
}

// Set while this thread runs a function in at_work().
thread_local Exchange* worker = nullptr;

// Peers are told of progress at most this often.
constexpr auto kTell = std::chrono::milliseconds(50);

}  // namespace

/// Marks the calling thread as being at work while this object lives.
class Exchange::Work {
 public:
  explicit Work(Exchange& exchange) : exchange_(exchange), before_(worker) {
    worker = &exchange_;
    exchange_.tell_progress(true);
  }
  ~Work() {
    exchange_.tell_progress(false);
    worker = before_;
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

 private:
  Exchange& exchange_;
  Exchange* const before_;
};

void Exchange::tell_progress(bool working) {
  const auto now = std::chrono::steady_clock::now();
  still_since_.store(working ? now.time_since_epoch().count() : 0, std::memory_order_relaxed);
  if (!group_ || (working && now - told_ < kTell)) return;
  told_ = working ? now : std::chrono::steady_clock::time_point();
  group_->working(working ? what_ : "");
}

void got_on() {
  if (worker) worker->tell_progress(true);
}

void Exchange::at_work(FunctionRef<void()> f) {
  const Work work(*this);
  f();
}

std::vector<std::string> Exchange::gather(const std::string& text) {
  if (!group_) return {text};
  Tensor mine = from_values<int64_t>({int64_t(text.size())}, {1}), sizes = empty({size()}, kI64);
  group_->all_gather(sizes, mine, timeout_);
  std::span<const int64_t> each(sizes.data<int64_t>(), size_t(size()));
  int64_t room = std::max<int64_t>(1, *std::ranges::max_element(each));
  Tensor all;
  if (rank() == 0) all = empty({size() * room}, kU8);
  group_->gather(std::span<const Tensor>(&all, rank() == 0 ? 1 : 0), bytes_of(text, room), 0,
                 timeout_);
  std::vector<std::string> out;
  if (rank() == 0)
    for (int r = 0; r < size(); ++r)
      out.emplace_back(static_cast<const char*>(all.raw()) + r * room, size_t(each[size_t(r)]));
  return out;
}

std::vector<std::string> Exchange::all_gather(const std::string& text) {
  if (!group_) return {text};
  Tensor mine = from_values<int64_t>({int64_t(text.size())}, {1}), sizes = empty({size()}, kI64);
  group_->all_gather(sizes, mine, timeout_);
  std::span<const int64_t> each(sizes.data<int64_t>(), size_t(size()));
  const int64_t room = std::max<int64_t>(1, *std::ranges::max_element(each));
  Tensor all = empty({size() * room}, kU8);
  group_->all_gather(all, bytes_of(text, room), timeout_);
  std::vector<std::string> out;
  for (int r = 0; r < size(); ++r)
    out.emplace_back(static_cast<const char*>(all.raw()) + r * room, size_t(each[size_t(r)]));
  return out;
}

std::string Exchange::scatter(const std::vector<std::string>& texts) {
  if (!group_) return texts.at(0);
  Tensor sizes = empty({size()}, kI64);
  for (int r = 0; r < size(); ++r)
    sizes.data<int64_t>()[r] = rank() == 0 ? int64_t(texts[size_t(r)].size()) : 0;
  group_->broadcast(sizes, 0, timeout_);
  std::span<const int64_t> each(sizes.data<int64_t>(), size_t(size()));
  int64_t room = std::max<int64_t>(1, *std::ranges::max_element(each));
  Tensor mine = empty({room}, kU8);
  std::vector<Tensor> all;
  for (const std::string& t : texts) all.push_back(bytes_of(t, room));
  group_->scatter(mine, all, 0, timeout_);
  return {static_cast<const char*>(mine.raw()), size_t(each[size_t(rank())])};
}

std::string Exchange::broadcast(const std::string& text) {
  if (!group_) return text;
  Tensor length = from_values<int64_t>({int64_t(text.size())}, {1});
  group_->broadcast(length, 0, timeout_);
  auto n = length.data<int64_t>()[0];
  if (n == 0) return {};
  Tensor bytes = rank() == 0 ? bytes_of(text, n) : empty({n}, kU8);
  group_->broadcast(bytes, 0, timeout_);
  return {static_cast<const char*>(bytes.raw()), size_t(n)};
}

bool Exchange::any(bool here) {
  if (!group_) return here;
  Tensor flag = from_values<int64_t>({here ? 1 : 0}, {1});
  group_->all_reduce(flag, ReduceOp::kMax, timeout_);
  return flag.data<int64_t>()[0] != 0;
}

void Exchange::together(FunctionRef<void()> f) {
  std::string trouble;
  bool failed = false;
  try {
    at_work(f);
  } catch (const UserError& e) {
    trouble = e.what();
    failed = true;
  }
  if (!group_) {
    TESSERA_CHECK(!failed, "{}", trouble);
    return;
  }
  if (!any(failed)) return;
  std::vector<std::string> all = gather(failed ? "!" + trouble : "");
  std::string verdict;
  int others = 0;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    if (verdict.empty())
      verdict = fmt::format("{} (on rank {}", all[r].substr(1), r);
    else
      ++others;
  }
  if (rank() == 0) verdict += others ? fmt::format(" and {} more)", others) : ")";
  throw UserError(broadcast(verdict));
}

}  // namespace tessera::checkpoint
