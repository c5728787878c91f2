#include "tests/vgpu/fake/gpu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace vgpu {

namespace {

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

// A number, or the end of the process: a setting that is misspelt must not pass for its default.
uint64_t number(const char* name, const char* value) {
  char* end;
  const uint64_t n = std::strtoull(value, &end, 10);
  if (*end || *value < '0' || *value > '9') {
    std::fprintf(stderr, "vgpu: %s=%s is not a number\n", name, value);
    std::abort();
  }
  return n;
}

Settings settings_of_environment() {
  Settings s;
  const auto integer = [](const char* name, auto* to) {
    if (const char* v = environment(name))
      *to = static_cast<std::remove_pointer_t<decltype(to)>>(number(name, v));
  };
  integer("VGPU_DEVICES", &s.devices);
  integer("VGPU_MEMORY", &s.memory_bytes);
  integer("VGPU_CHECK", &s.checked);
  integer("VGPU_TRACE", &s.trace);
  integer("VGPU_PROGRESS_MS", &s.progress_ms);
  if (s.devices > 64) {
    std::fprintf(stderr, "vgpu: VGPU_DEVICES=%d, at most 64\n", s.devices);
    std::abort();
  }
  if (const char* v = environment("VGPU_SEED")) {
    if (std::string(v) == "eager") {
      s.order = Settings::kEager;
    } else if (std::string(v) != "late" && (s.seed = number("VGPU_SEED", v)) != 0) {
      s.order = Settings::kRandom;
    }
  }
  if (const char* v = environment("VGPU_COUNTERS")) s.counters = v;
  if (const char* v = environment("VGPU_FAIL")) {
    const std::string text = v;
    const size_t first = text.find(':'), second = text.find(':', first + 1);
    s.fail_op = text.substr(0, first);
    if (first != text.npos)
      s.fail_nth =
          static_cast<int>(number("VGPU_FAIL", text.substr(first + 1, second - first - 1).c_str()));
    if (first != text.npos && second != text.npos)
      s.fail_error = static_cast<int>(number("VGPU_FAIL", text.substr(second + 1).c_str()));
  }
  return s;
}

// A line for each name: "call NAME COUNT", "op NAME RUNS BYTES_READ BYTES_WRITTEN", split by tabs.
void write_counters() {
  std::lock_guard lock(gpu().mutex);
  std::FILE* file = std::fopen(gpu().settings.counters.c_str(), "w");
  if (!file) return std::perror("vgpu: VGPU_COUNTERS");
  std::map<std::string, uint64_t> calls;
  for (const auto& [name, count] : gpu().calls) calls[name] += count;
  for (const auto& [name, count] : calls)
    std::fprintf(file, "call\t%s\t%llu\n", name.c_str(), static_cast<unsigned long long>(count));
  for (const auto& [name, c] : gpu().counters)
    std::fprintf(file, "op\t%s\t%llu\t%llu\t%llu\n", name.c_str(),
                 static_cast<unsigned long long>(c.runs),
                 static_cast<unsigned long long>(c.bytes_read),
                 static_cast<unsigned long long>(c.bytes_written));
  std::fclose(file);
}

thread_local bool host_function = false, executes = false;

}  // namespace

Gpu& gpu() {
  static auto* one = new Gpu;
  return *one;
}
bool in_host_function() { return host_function; }
bool runs_here() { return executes; }

Gpu::Gpu() : settings(settings_of_environment()), random_(settings.seed) {
  if (settings.checked) shadow = std::make_unique<Shadow>(memory);
  devices.resize(static_cast<size_t>(settings.devices));
  requested_left_ = settings.fail_nth;
  install_fault_handler();
  if (!settings.counters.empty()) std::atexit(write_counters);
  std::thread([this] { progress(); }).detach();
}

uint32_t Gpu::new_lane(int device) {
  auto& idle = idle_lanes_[device];
  if (idle.empty()) {
    lanes_.push_back({device, 0});
    return static_cast<uint32_t>(lanes_.size() - 1);
  }
  const uint32_t lane = idle.back();
  idle.pop_back();
  return lane;
}

// A lane whose ops are not done is not used again: the next stream's ops are not behind them.
void Gpu::give_back_lane(uint32_t lane) {
  const auto pending = [&](const OpRef& op) { return op->lane == lane; };
  if (std::ranges::none_of(pending_, pending)) idle_lanes_[lanes_[lane].device].push_back(lane);
}

uint64_t Gpu::count_of(std::string_view call) const {
  uint64_t sum = 0;
  for (const auto& [name, count] : calls) sum += name == call ? count : 0;
  return sum;
}

void Gpu::fail(int device, Result result, const std::string& text) {
  Result& error = devices[static_cast<size_t>(device)].error;
  if (error == Result::kSuccess) error = result;
  pinned.forget(device);
  std::fprintf(stderr, "vgpu: %s\n", text.c_str());
}

// ---- submitting ----

void Gpu::add(const OpRef& op) {
  for (const OpRef& a : op->after) op->clock.join(a->clock);
  op->clock.set(op->lane, ++lanes_[op->lane].ops);
  op->number = next_number_++;
  if (order) order->submitted(*op);
  if (shadow) shadow->stamp(*op);
  const bool runs = devices[static_cast<size_t>(op->device)].error == Result::kSuccess;
  for (const Op::HostBuffer& b : op->host_buffers) {
    if (!runs) break;
    const std::string other = pinned.use(b.at, b.bytes, op, b.writes);
    if (shadow && !other.empty())
      op->refused = op->name + ": race: uses a pinned buffer that '" + other +
                    "' of another stream uses too, and no event orders the two";
  }
  pending_.push_back(op);
  ++activity_;
  changed_.notify_all();
}

static OpRef next_of(StreamState& s, OpKind kind, std::string name) {
  auto op = std::make_shared<Op>();
  op->kind = kind, op->name = std::move(name);
  op->device = s.device, op->lane = s.lane, op->capture = s.capture;
  if (s.last) op->after.push_back(s.last);
  for (OpRef& w : s.waits) op->after.push_back(std::move(w));
  s.waits.clear();
  s.last = op;
  return op;
}

OpRef Gpu::submit(StreamState& s, OpKind kind, std::string name, std::function<void()> run,
                  std::vector<Op::HostBuffer> host_buffers) {
  OpRef op = next_of(s, kind, std::move(name));
  op->run = std::move(run), op->host_buffers = std::move(host_buffers);
  if (s.capture) return op;  // the caller adds it to its capture
  op->clock = host_;
  add(op);
  return op;
}

OpRef Gpu::submit_polled(StreamState& s, std::string name, std::function<bool()> poll,
                         std::function<uint64_t()> news) {
  OpRef op = next_of(s, OpKind::kKernel, std::move(name));
  op->poll = std::move(poll), op->news = std::move(news);
  op->clock = host_;
  add(op);
  return op;
}

// ---- running ----

void Gpu::run_some() {
  if (running_) return;
  if (settings.order == Settings::kEager) {
    while (run_one(Hosts::kNot)) continue;
    if (!pending_.empty()) hurry();
  }
  if (settings.order == Settings::kRandom)
    while (random_() % 3 == 0 && run_one(Hosts::kNot)) continue;
}

void Gpu::hurry() {
  hurry_ = true;
  changed_.notify_all();
}

// Any of those that may run now; the first of them where all run at once. Those that wait for other
// devices get their chance and are passed over.
bool Gpu::run_one(Hosts hosts) {
  std::vector<OpRef> ready;
  for (const OpRef& op : pending_)
    if (op->state == Op::kPending && (hosts == Hosts::kToo || op->kind != OpKind::kHost) &&
        std::ranges::all_of(op->after, [](const OpRef& a) { return a->done(); })) {
      ready.push_back(op);
      if (settings.order == Settings::kEager && !op->poll) break;
    }
  if (ready.empty()) return false;
  const size_t first = settings.order == Settings::kEager ? 0 : random_() % ready.size();
  for (size_t i = 0; i < ready.size(); ++i)
    if (run_op(ready[(first + i) % ready.size()])) return true;
  return false;
}

bool Gpu::fails_on_request(const Op& op) {
  return !settings.fail_op.empty() && op.name == settings.fail_op && --requested_left_ == 0;
}

bool Gpu::execute(const OpRef& op) {
  use_signal_stack();
  bool done = true;
  running_ = op, executes = true;
  memory.open();
  if (shadow) shadow->begin(*op);
  try {
    if (!op->begun && fails_on_request(*op))
      throw OpError(Result{settings.fail_error}, op->name + ": fails, as VGPU_FAIL asks");
    if (!op->refused.empty()) throw OpError(Result::kIllegalAddress, op->refused);
    if (op->poll)
      done = op->poll();
    else
      op->run();
  } catch (const OpError& e) {
    fail(op->device, e.result, e.what());
  }
  const auto count = [&](Counters& c) {
    c.runs += done;
    if (shadow) c.bytes_read += shadow->bytes_read, c.bytes_written += shadow->bytes_written;
  };
  count(counters[op->name]);
  if (op->kind == OpKind::kKernel) count(kernels);
  if (shadow) shadow->end();
  memory.close();
  running_ = nullptr, executes = false;
  return done;
}

void Gpu::run_host_function(const OpRef& op) {
  const int depth = memory.suspend();
  mutex.unlock();
  host_function = true;
  op->run();
  host_function = false;
  mutex.lock();
  memory.resume(depth);
}

bool Gpu::run_op(const OpRef& op) {
  const OpRef keep = op;
  if (keep->news && devices[static_cast<size_t>(keep->device)].error == Result::kSuccess) {
    const uint64_t news = keep->news();
    if (keep->begun && news == keep->seen) return false;
    keep->seen = news;
  }
  keep->state = Op::kRunning;
  if (settings.trace && !keep->begun)
    std::fprintf(stderr, "vgpu: device %d, lane %u, op %u: %s\n", keep->device, keep->lane,
                 keep->number, keep->name.c_str());
  if ((keep->run || keep->poll) &&
      devices[static_cast<size_t>(keep->device)].error == Result::kSuccess) {
    if (keep->kind == OpKind::kHost)
      run_host_function(keep);
    else if (!execute(keep)) {
      keep->begun = true, keep->state = Op::kPending;
      return false;
    }
  }
  keep->state = Op::kDone;
  keep->finished = std::chrono::steady_clock::now();
  keep->after.clear(), keep->run = nullptr, keep->poll = nullptr, keep->news = nullptr,
                       keep->call = nullptr;
  std::erase(pending_, keep);
  ++activity_;
  changed_.notify_all();
  return true;
}

// The mutex is free meanwhile: other ranks may be threads of this process.
void Gpu::await_peers() {
  if (run_one(Hosts::kNot)) return;
  hurry();
  without_lock([&](auto& lock) { changed_.wait_for(lock, std::chrono::microseconds(500)); });
}

// Memory is not open for a thread that waits: another one may close it meanwhile.
template <class Wait>
void Gpu::without_lock(Wait wait) {
  const int depth = memory.suspend();
  std::unique_lock lock(mutex, std::adopt_lock);
  wait(lock);
  lock.release();
  memory.resume(depth);
}

// No more than it needs, but what the seed throws in.
void Gpu::finish(const OpRef& op) {
  if (op->done()) return;
  memory.open();  // once for all of them
  std::vector<OpRef> path{op};
  while (!path.empty()) {
    const OpRef next = path.back();
    if (next->state == Op::kRunning)  // by another thread: a function of the host
      without_lock([&](auto& lock) { changed_.wait(lock, [&] { return next->done(); }); });
    if (next->done()) {
      path.pop_back();
      continue;
    }
    const auto open = std::ranges::find_if(next->after, [](const OpRef& a) { return !a->done(); });
    if (open != next->after.end()) {
      path.push_back(*open);
      continue;
    }
    path.pop_back();
    run_some();
    if (next->state == Op::kPending && !run_op(next)) await_peers();
    if (!next->done()) path.push_back(next);
  }
  memory.close();
}

void Gpu::wait_for(const OpRef& op) {
  if (order) order->host_waits(op->device, op->name);
  see_end(op);
}

void Gpu::see_end(const OpRef& op) {
  finish(op);
  host_.join(op->clock);
  pinned.host_has_waited(host_);
}

bool Gpu::query(const OpRef& op) {
  if (!op->done() && !run_one(Hosts::kNot)) hurry();
  if (!op->done()) return false;
  see_end(op);
  return true;
}

void Gpu::wait_for_all(int device) {
  if (order) order->host_waits(device, "all");
  for (;;) {
    std::vector<OpRef> open;
    for (const OpRef& op : pending_)
      if (op->device == device) open.push_back(op);
    if (open.empty()) break;
    see_end(open[random_() % open.size()]);
  }
  // Ops that ran by themselves meanwhile were waited for too.
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane)
    if (lanes_[lane].device == device) host_.set(lane, lanes_[lane].ops);
  pinned.host_has_waited(host_);
}

void Gpu::drain() {
  if (order)
    for (size_t d = 0; d < devices.size(); ++d) order->host_waits(static_cast<int>(d), "all");
  while (!pending_.empty()) finish(OpRef(pending_.front()));
}

// Waits until somebody is in a hurry, or nothing has been submitted and nothing has run for a
// while; what has begun goes on meanwhile, as it does on a device.
void Gpu::wait_until_idle(std::unique_lock<std::mutex>& lock) {
  const std::chrono::milliseconds limit(settings.progress_ms);
  uint64_t seen = activity_;
  for (auto since = std::chrono::steady_clock::now();
       !hurry_ && std::chrono::steady_clock::now() - since < limit;) {
    std::vector<OpRef> begun;
    for (const OpRef& op : pending_)
      if (op->begun && op->state == Op::kPending) begun.push_back(op);
    for (const OpRef& op : begun) run_op(op);
    if (seen != activity_) seen = activity_, since = std::chrono::steady_clock::now();
    changed_.wait_for(lock, begun.empty() ? limit : std::chrono::milliseconds(1),
                      [&] { return hurry_ || seen != activity_; });
  }
}

// A device works while the host does something else. Late is late, not never: ranks whose hosts
// wait for each other by other means would never meet.
void Gpu::progress() {
  std::unique_lock lock(mutex);
  for (;;) {
    changed_.wait(lock, [this] { return !pending_.empty(); });
    wait_until_idle(lock);
    hurry_ = false;
    for (bool idle = true; idle && run_one(Hosts::kToo);) {  // until somebody else does something
      const uint64_t mine = activity_;
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      idle = mine == activity_;
    }
    if (!pending_.empty()) changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
}

}  // namespace vgpu
