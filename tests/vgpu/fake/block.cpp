#include "tests/vgpu/fake/block.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <vector>

#include "tests/vgpu/fake/fiber.h"
#include "tests/vgpu/fake/shared_checks.h"

namespace vgpu {

namespace {

std::string text(uint3 i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

// Lanes of one mask that exchange values. Two sets of slots: who is released first may begin the
// next exchange while the others still read the last one.
struct Exchange {
  unsigned mask = 0, arrived = 0, turn = 0;
  int line = 0;
  alignas(16) char slots[2][32 * 16];
  std::vector<Fiber*> waiting;
};
struct Warp {
  std::deque<Exchange> exchanges;  // nobody's slots may move
  uint32_t passed = 0;
};

class Runner {
 public:
  void run(const Launch& launch);
  int barrier(VgpuJoin join, int mine, int line);
  const char* exchange(unsigned mask, const void* mine, int bytes, int line);
  void touch_shared(const void* at, int bytes, VgpuAccess kind);
  void fence() { fenced_ = true; }
  void note_atomic();
  [[noreturn]] void stop(Result result, const std::string& why);

  const Place& place() const { return place_; }
  std::string where() const {
    return launch_ ? "block " + text(at_->block) + " thread " + text(at_->thread) : "";
  }
  void* fresh_stack() const { return now_ ? now_->top : nullptr; }
  bool has_published(uint64_t block) const {
    return block < published_.size() && published_[block];
  }
  bool is_shared(const void* p) const;
  void update_place();

 private:
  static void fiber_main();
  void resume(Fiber* fiber);
  void give_way();
  bool release_barrier();
  bool release(Warp& warp, size_t number, Exchange& exchange);
  void draw_order(std::mt19937_64& random);
  void run_block();
  unsigned thread() const {
    return at_->thread.x + at_->threads.x * (at_->thread.y + at_->threads.y * at_->thread.z);
  }

  const Launch* launch_ = nullptr;
  VgpuBlock* at_ = nullptr;
  FiberPool fibers_{&fiber_main};
  Fiber* now_ = nullptr;
  void* home_ = nullptr;  // the caller's stack
  std::vector<Fiber*> runnable_, at_barrier_;
  size_t first_runnable_ = 0;
  int joined_ = 0, join_result_ = 0;
  std::vector<Warp> warps_;
  std::vector<unsigned short> order_;
  SharedChecks shared_;
  std::vector<bool> published_;
  bool fenced_ = false;
  uint32_t barriers_ = 0;  // passed since the process began
  Place place_;
  Result result_{};
  std::string error_;
};

// One op runs at a time, also when the process ends: modules are then unloaded once all has run.
Runner& runner = *new Runner;

void Runner::fiber_main() {
  for (;;) {
    runner.launch_->kernel->run(runner.launch_->parameters);
    runner.fibers_.give_back(runner.now_);
    runner.give_way();
  }
}

void Runner::resume(Fiber* fiber) {
  Fiber* before = now_;
  if (before == fiber) return;
  if (before) before->thread = at_->thread;
  now_ = fiber;
  at_->thread = fiber->thread;
  switch_stack(before ? &before->stack_pointer : &home_, fiber->stack_pointer);
}

// To a thread that can run, to those that have not begun, or home.
void Runner::give_way() {
  for (;;) {
    if (first_runnable_ < runnable_.size()) {
      Fiber* next = runnable_[first_runnable_++];
      if (first_runnable_ == runnable_.size()) runnable_.clear(), first_runnable_ = 0;
      return resume(next);
    }
    if (at_->next < at_->count) return resume(fibers_.take());
    if (release_barrier()) continue;
    bool released = false;
    const Fiber* waits = at_barrier_.empty() ? nullptr : at_barrier_[0];
    for (size_t w = 0; w < warps_.size(); ++w)
      for (Exchange& e : warps_[w].exchanges)
        if (!e.waiting.empty()) {
          if (release(warps_[w], w, e))
            released = true;
          else
            waits = e.waiting[0];
        }
    if (released) continue;
    if (!waits) break;
    at_->thread = waits->thread;
    stop(Result::kLaunchTimeout,
         at_barrier_.empty()
             ? "deadlock: lanes of a mask are missing at line " + std::to_string(waits->line)
             : "deadlock: the barrier of line " + std::to_string(at_barrier_[0]->line) +
                   " stands in a branch that not all threads take");
  }
  Fiber* before = now_;
  now_ = nullptr;
  switch_stack(&before->stack_pointer, home_);
}

void Runner::stop(Result result, const std::string& why) {
  if (error_.empty()) error_ = why + " (" + where() + ")", result_ = result;
  void* abandoned = nullptr;
  now_ = nullptr;
  switch_stack(&abandoned, home_);
  __builtin_unreachable();
}

// Threads that have returned count as those that have come.
bool Runner::release_barrier() {
  if (at_barrier_.empty() || at_barrier_.size() + at_->returned < at_->count) return false;
  const Fiber* first = at_barrier_[0];
  for (const Fiber* other : at_barrier_)
    if (other->line != first->line || other->join != first->join) {
      at_->thread = other->thread;
      stop(Result::kLaunchFailed, "barriers of lines " + std::to_string(first->line) + " and " +
                                      std::to_string(other->line) +
                                      " meet: a barrier stands in a branch that not all take");
    }
  const int came = static_cast<int>(at_barrier_.size());
  join_result_ = first->join == kVgpuAnd  ? joined_ == came
                 : first->join == kVgpuOr ? joined_ != 0
                                          : joined_;
  joined_ = 0;
  ++barriers_;
  runnable_.insert(runnable_.end(), at_barrier_.begin(), at_barrier_.end());
  at_barrier_.clear();
  return true;
}

int Runner::barrier(VgpuJoin join, int mine, int line) {
  now_->line = line, now_->join = join;
  joined_ += mine != 0;
  at_barrier_.push_back(now_);
  give_way();
  return join_result_;
}

bool Runner::release(Warp& warp, size_t number, Exchange& e) {
  const unsigned left = at_->count - static_cast<unsigned>(number) * 32;
  const unsigned lanes = left >= 32 ? ~0u : (1u << left) - 1;
  const unsigned expected = e.mask & lanes & ~at_->returned_lanes[number];
  if ((e.arrived & expected) != expected) return false;
  e.arrived = 0, ++e.turn, ++warp.passed;
  runnable_.insert(runnable_.end(), e.waiting.begin(), e.waiting.end());
  e.waiting.clear();
  return true;
}

const char* Runner::exchange(unsigned mask, const void* mine, int bytes, int line) {
  const unsigned t = thread(), lane = t & 31;
  Warp& warp = warps_[t / 32];
  if (!(mask >> lane & 1))
    stop(Result::kLaunchFailed, "the mask of line " + std::to_string(line) + " leaves out lane " +
                                    std::to_string(lane) + ", which calls it");
  Exchange* e = nullptr;
  for (Exchange& other : warp.exchanges) {
    if (other.mask == mask) {
      e = &other;
    } else if (other.arrived & mask) {
      stop(Result::kLaunchFailed, "lanes of a warp meet with different masks at lines " +
                                      std::to_string(other.line) + " and " + std::to_string(line));
    }
  }
  if (!e) {
    e = &warp.exchanges.emplace_back();
    e->mask = mask;
  }
  if (!e->arrived) {
    e->line = line;
  } else if (e->line != line) {
    stop(Result::kLaunchFailed, "lanes of a warp meet at lines " + std::to_string(e->line) +
                                    " and " + std::to_string(line) +
                                    ": an exchange stands in a branch that not all take");
  }
  char* slots = e->slots[e->turn & 1];
  if (bytes) std::memcpy(slots + 16 * lane, mine, static_cast<size_t>(bytes));
  e->arrived |= 1u << lane;
  if (release(warp, t / 32, *e)) return slots;  // the last to come goes on
  now_->line = line;
  e->waiting.push_back(now_);
  give_way();
  return slots;
}

bool Runner::is_shared(const void* p) const {
  const VgpuModule& m = *launch_->module;
  const auto* c = static_cast<const char*>(p);
  return (c >= m.shared && c < m.shared_end) ||
         (c >= m.dynamic - kVgpuDynamicZone &&
          c < m.dynamic + kVgpuDynamicBytes + kVgpuDynamicZone);
}

void Runner::touch_shared(const void* p, int bytes, VgpuAccess kind) {
  const VgpuModule& m = *launch_->module;
  const auto* c = static_cast<const char*>(p);
  auto at = static_cast<size_t>(c - m.shared);
  if (c < m.shared || c >= m.shared_end) {
    const long offset = c - m.dynamic;
    if (offset < 0 || offset + bytes > static_cast<long>(launch_->dynamic_bytes))
      stop(Result::kIllegalAddress, "out of bounds: byte " + std::to_string(offset) + " of " +
                                        std::to_string(launch_->dynamic_bytes) +
                                        " bytes of dynamic shared memory");
    at = ((static_cast<size_t>(m.shared_end - m.shared) + 3) & ~size_t{3}) +
         static_cast<size_t>(offset);
  }
  const unsigned t = thread();
  const std::string wrong = shared_.touch(
      at, bytes, kind, {barriers_, warps_[t / 32].passed, static_cast<uint16_t>(t), 0});
  if (!wrong.empty()) stop(Result::kLaunchFailed, wrong);
}

void Runner::note_atomic() {
  place_.atomic = true;
  if (fenced_ && place_.block < published_.size()) published_[place_.block] = true;
}

void Runner::update_place() {
  if (!launch_) return;
  place_.thread = thread();
  place_.barriers = barriers_;
}

// Warps in any order, each up or down: a kernel without the right barriers is found out.
void Runner::draw_order(std::mt19937_64& random) {
  const unsigned threads = at_->count;
  std::vector<unsigned> warps((threads + 31) / 32);
  std::iota(warps.begin(), warps.end(), 0);
  if (launch_->seed) std::shuffle(warps.begin(), warps.end(), random);
  order_.resize(threads);
  size_t k = 0;
  for (unsigned w : warps) {
    const bool down = launch_->seed && random() & 1;
    const unsigned begin = w * 32, end = std::min(threads, begin + 32);
    for (unsigned t = begin; t < end; ++t)
      order_[k++] = static_cast<unsigned short>(down ? end - 1 - (t - begin) : t);
  }
  at_->order = order_.data();
}

void Runner::run_block() {
  at_->next = at_->returned = 0;
  std::fill(std::begin(at_->returned_lanes), std::end(at_->returned_lanes), 0u);
  for (Warp& w : warps_) {
    if (w.exchanges.size() > 8) w.exchanges.clear();
    for (Exchange& e : w.exchanges) e.arrived = 0, e.waiting.clear();
  }
  ++barriers_, joined_ = 0, fenced_ = false, place_.atomic = false;
  const VgpuModule& m = *launch_->module;
  const auto fixed = static_cast<size_t>(m.shared_end - m.shared);
  // NaN in every type of float: nobody has written here.
  if (fixed) std::memset(m.shared, 0xff, fixed);
  if (launch_->dynamic_bytes) std::memset(m.dynamic, 0xff, launch_->dynamic_bytes);
  if (m.checked) shared_.begin_block(fixed + 4 + launch_->dynamic_bytes, barriers_);
  resume(fibers_.take());
}

void Runner::run(const Launch& launch) {
  launch_ = &launch, at_ = launch.module->at;
  error_.clear();
  std::mt19937_64 random(launch.seed);
  *at_ = {};
  at_->threads = launch.threads, at_->blocks = launch.blocks;
  at_->count = launch.threads.x * launch.threads.y * launch.threads.z;
  draw_order(random);
  if (warps_.size() < (at_->count + 31) / 32) warps_.resize((at_->count + 31) / 32);
  const uint64_t blocks = uint64_t{launch.blocks.x} * launch.blocks.y * launch.blocks.z;
  published_.assign(launch.module->checked ? blocks : 0, false);
  // Every block once, from anywhere, in steps that have no divisor in common with their number.
  uint64_t first = 0, step = 1;
  if (launch.seed && blocks > 1) {
    first = random() % blocks;
    do step = random() % blocks;
    while (std::gcd(step, blocks) != 1);
  }
  place_ = {};
  place_.running = true;
  for (uint64_t i = 0, n = first; i < blocks && error_.empty(); ++i, n = (n + step) % blocks) {
    at_->block = {static_cast<unsigned>(n % launch.blocks.x),
                  static_cast<unsigned>(n / launch.blocks.x % launch.blocks.y),
                  static_cast<unsigned>(n / launch.blocks.x / launch.blocks.y)};
    place_.block = n;
    run_block();
  }
  place_ = {};
  launch_ = nullptr;
  if (error_.empty()) return;
  fibers_.reset();
  runnable_.clear(), first_runnable_ = 0, at_barrier_.clear();
  throw OpError(result_, launch.name + ": " + error_);
}

void (*touch_global)(const void* at, int bytes, VgpuAccess kind);

}  // namespace

void run_blocks(const Launch& launch) { runner.run(launch); }
const Place& place() { return runner.update_place(), runner.place(); }
std::string where_it_runs() { return runner.where(); }
bool has_published(uint64_t block) { return runner.has_published(block); }
void* fresh_stack() { return runner.fresh_stack(); }
void stop(Result result, const std::string& why) {
  if (!runner.fresh_stack()) throw OpError(result, why);
  runner.stop(result, why);
}

const VgpuCalls* module_calls(uintptr_t heap, size_t heap_bytes,
                              void (*touch)(const void* at, int bytes, VgpuAccess kind)) {
  touch_global = touch;
  static const VgpuCalls table = {
      [](VgpuJoin join, int mine, int line) { return runner.barrier(join, mine, line); },
      [](unsigned mask, const void* mine, int bytes, int line) {
        return runner.exchange(mask, mine, bytes, line);
      },
      [](unsigned mask, unsigned lane, int line) {
        char hex[16];
        std::snprintf(hex, sizeof(hex), "0x%x", mask);
        runner.stop(Result::kLaunchFailed, "line " + std::to_string(line) + " reads from lane " +
                                               std::to_string(lane) + ", which the mask " + hex +
                                               " or the block does not have");
      },
      [] { runner.fence(); },
      [](int error, const char* why, int line) {
        runner.stop(Result{error}, std::string(why) + ", line " + std::to_string(line));
      },
      [](const void* at, int bytes, VgpuAccess kind) {
        if (kind == kVgpuAtomic) runner.note_atomic();
        if (runner.is_shared(at))
          runner.touch_shared(at, bytes, kind);
        else
          touch_global(at, bytes, kind);
      },
      heap,
      heap_bytes};
  return &table;
}

}  // namespace vgpu
