#include "core/base/profile.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace tessera {
namespace {

constexpr size_t kMaxEvents = size_t(1) << 20;

// Time that events within the innermost open span of this thread took.
constinit thread_local double inside_us = 0;

}  // namespace

uint64_t Profile::next_number() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

void Profile::add(ProfileEvent event) {
  std::lock_guard lock(mutex_);
  if (events_.size() + later_.size() >= kMaxEvents) {
    ++dropped_;
    return;
  }
  events_.push_back(std::move(event));
}

void Profile::add_later(std::function<ProfileEvent()> finish) {
  std::lock_guard lock(mutex_);
  if (events_.size() + later_.size() >= kMaxEvents)
    ++dropped_;
  else
    later_.push_back(std::move(finish));
}

std::vector<ProfileEvent> Profile::events() const {
  std::vector<std::function<ProfileEvent()>> later;
  {
    std::lock_guard lock(mutex_);
    later.swap(later_);
  }
  std::vector<ProfileEvent> finished;  // without the lock: they may wait
  for (const auto& finish : later) finished.push_back(finish());
  std::lock_guard lock(mutex_);
  for (ProfileEvent& e : finished) events_.push_back(std::move(e));
  return events_;
}

size_t Profile::dropped() const {
  std::lock_guard lock(mutex_);
  return dropped_;
}

double Profile::now_us() const {
  using std::chrono::steady_clock;
  return epoch_us_ +
         std::chrono::duration<double, std::micro>(steady_clock::now() - start_).count();
}

Profiler::Profiler() : profile_(make_ref<Profile>()) {
  TESSERA_CHECK(!current_profile(), "profiler: this thread is recorded already; end that first");
  detail::profile_of_thread = profile_.get();
}
Profiler::~Profiler() { detail::profile_of_thread = nullptr; }

struct ProfileSpan::Open {
  Ref<Profile> profile;  // the span is recorded to its end, even if the profiler has ended
  ProfileEvent event;
  double outer_inside_us = 0;
  bool is_range = false;  // of nvtx
};

void ProfileSpan::begin(std::string_view name, std::string_view category) {
  open_ = new Open{Ref<Profile>(profile_), {.name = std::string(name), .category = category}};
  open_->is_range = nvtx::is_on();
  if (open_->is_range) nvtx::push(open_->event.name.c_str());
  if (!profile_) return;
  open_->outer_inside_us = std::exchange(inside_us, 0);
  open_->event.begin_us = profile_->now_us();
}

void ProfileSpan::set_detail(std::string text) {
  if (open_) open_->event.detail = std::move(text);
}

void ProfileSpan::end() {
  std::unique_ptr<Open> open(open_);
  if (open->is_range) nvtx::pop();
  if (!profile_) return;
  ProfileEvent& e = open->event;
  e.took_us = profile_->now_us() - e.begin_us;
  e.own_us = e.took_us - inside_us;
  inside_us = open->outer_inside_us + e.took_us;
  profile_->add(std::move(e));
}

std::string trace_events(std::span<const ProfileEvent> events, int rank) {
  using nlohmann::json;
  constexpr auto kReplace = json::error_handler_t::replace;
  std::string text;
  auto write = [&](const json& event) {
    text += (text.empty() ? "" : ",\n") + event.dump(-1, ' ', false, kReplace);
  };
  std::map<std::string, int> lanes{{"", 0}};
  for (const ProfileEvent& e : events) {
    if (e.category == "memory") {
      write({{"name", e.name},
             {"ph", "C"},
             {"pid", rank},
             {"ts", e.begin_us},
             {"args", {{"bytes", e.bytes}}}});
      continue;
    }
    int lane = lanes.try_emplace(e.lane, int(lanes.size())).first->second;
    json args = json::object();
    if (!e.detail.empty()) args["detail"] = e.detail;
    if (e.bytes) args["bytes"] = e.bytes;
    write({{"name", e.name},
           {"cat", e.category},
           {"ph", "X"},
           {"pid", rank},
           {"tid", lane},
           {"ts", e.begin_us},
           {"dur", e.took_us},
           {"args", std::move(args)}});
  }
  auto name = [&](const char* what, int lane, const std::string& value) {
    write({{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", lane}, {"args", {{"name", value}}}});
  };
  name("process_name", 0, fmt::format("rank {}", rank));
  for (const auto& [lane, number] : lanes)
    name("thread_name", number, lane.empty() ? "program" : lane);
  return text;
}

std::string chrome_trace(std::span<const std::string> ranks) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ",\n" : "") + ranks[i];
  return text + "]}\n";
}

double CommunicationTime::hidden() const {
  return total_us > 0 ? std::max(0.0, 1 - exposed_us / total_us) : 1;
}

CommunicationTime communication_of(std::span<const ProfileEvent> events) {
  CommunicationTime c;
  for (const ProfileEvent& e : events) {
    if (e.category == "collective") c.total_us += e.took_us;
    if (e.category == "wait" && e.name == "wait") c.exposed_us += e.own_us;
  }
  return c;
}

std::string profile_table(std::span<const ProfileEvent> events, size_t rows) {
  struct Row {
    std::string name;
    std::string_view category;
    int64_t calls = 0;
    double us = 0;
  };
  std::map<std::pair<std::string_view, std::string>, Row> by_name;
  double first = 0, last = 0;
  for (const ProfileEvent& e : events) {
    if (e.category == "memory") continue;
    if (last == 0 || e.begin_us < first) first = e.begin_us;
    last = std::max(last, e.begin_us + e.took_us);
    if (e.category == "span" || e.category == "module") continue;
    Row& row = by_name[{e.category, e.name}];
    row.name = e.name, row.category = e.category;
    ++row.calls, row.us += e.own_us;
  }
  std::vector<Row> table;
  for (auto& [key, row] : by_name) table.push_back(std::move(row));
  std::stable_sort(table.begin(), table.end(),
                   [](const Row& a, const Row& b) { return a.us > b.us; });
  if (table.size() > rows) table.resize(rows);
  std::string text = fmt::format("{:<40} {:<10} {:>8} {:>10} {:>7} {:>10}\n", "name", "kind",
                                 "calls", "ms", "share", "us/call");
  for (const Row& r : table)
    text += fmt::format("{:<40.40} {:<10} {:>8} {:>10.3f} {:>6.1f}% {:>10.2f}\n", r.name,
                        r.category, r.calls, r.us / 1e3, 100 * r.us / std::max(last - first, 1e-9),
                        r.us / double(r.calls));
  return text;
}

}  // namespace tessera
