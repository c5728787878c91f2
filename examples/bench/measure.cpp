#include "examples/bench/measure.h"

#include <fmt/ranges.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

#include "core/base/error.h"

namespace tessera::bench {
namespace {

cpu_set_t mask_at_start() {
  static const cpu_set_t mask = [] {
    cpu_set_t m;
    CPU_ZERO(&m);
    sched_getaffinity(0, sizeof(m), &m);
    return m;
  }();
  return mask;
}
const cpu_set_t kReadBeforeMain = mask_at_start();  // before any thread is bound

double quantile(const std::vector<double>& sorted, double q) {
  double at = q * double(sorted.size() - 1);
  size_t i = size_t(at);
  double next = sorted[std::min(i + 1, sorted.size() - 1)];
  return sorted[i] + (next - sorted[i]) * (at - double(i));
}

Clock clock_chosen = Clock::kWall;  // set once, while the command line is read

}  // namespace

void set_clock(Clock clock) { clock_chosen = clock; }
Clock clock_in_use() { return clock_chosen; }

double now_seconds() {
  timespec t;
  clock_gettime(clock_chosen == Clock::kWall ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

Stats stats_of(std::vector<double> s) {
  TESSERA_ASSERT(!s.empty(), "statistics of no samples");
  std::sort(s.begin(), s.end());
  return {quantile(s, 0.25), quantile(s, 0.5), quantile(s, 0.75),
          s.front(),         s.back(),         int(s.size())};
}

Interval median_interval(std::vector<double> s) {
  Stats middle = stats_of(s);
  std::sort(s.begin(), s.end());
  // r is the largest number for which fewer than r of n samples are on one given side of the median
  // with a probability of at most 2.5 %: the median is then between the r-th from below and the
  // r-th from above.
  size_t n = s.size(), r = 0;
  double probability = std::pow(0.5, double(n)), below = probability;
  while (below <= 0.025) {
    ++r;
    probability *= double(n - r + 1) / double(r);
    below += probability;
  }
  if (r == 0) {
    double unbounded = std::numeric_limits<double>::infinity();
    return {middle.median, -unbounded, unbounded};
  }
  return {middle.median, s[r - 1], s[n - r]};
}

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t mask = mask_at_start();
  for (int c = 0; c < CPU_SETSIZE; ++c)
    if (CPU_ISSET(c, &mask)) cores.push_back(c);
  return cores;
}

int bind_to_core(int cpu) {
  std::vector<int> cores = allowed_cores();
  if (cpu < 0) cpu = cores.back();
  TESSERA_CHECK(std::find(cores.begin(), cores.end(), cpu) != cores.end(),
                "bench: core {} is not one this process may use ({} to {}); choose another --cpu",
                cpu, cores.front(), cores.back());
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  TESSERA_CHECK(sched_setaffinity(0, sizeof(one), &one) == 0, "bench: cannot bind to core {}", cpu);
  return cpu;
}

void unbind() {
  cpu_set_t mask = mask_at_start();
  sched_setaffinity(0, sizeof(mask), &mask);
}

Stats time_batches(const std::function<void(int64_t)>& batch, int samples, double sample_seconds) {
  batch(1);
  int64_t calls = 1;
  for (;;) {  // finds how many calls fill a sample
    Stopwatch w;
    batch(calls);
    double t = w.seconds();
    if (t >= sample_seconds) break;
    calls =
        t < sample_seconds / 16 ? calls * 8 : int64_t(double(calls) * sample_seconds / t * 1.1) + 1;
  }
  std::vector<double> times;
  for (int s = 0; s < samples; ++s) {
    Stopwatch w;
    batch(calls);
    times.push_back(w.seconds() / double(calls));
  }
  return stats_of(times);
}

std::vector<Stats> time_in_turn(const std::vector<std::function<void()>>& works, int samples,
                                const std::function<void()>& before) {
  std::vector<std::vector<double>> times(works.size());
  for (auto& work : works) work();
  for (int s = 0; s < samples; ++s) {
    for (size_t i = 0; i < works.size(); ++i) {
      if (before) before();
      Stopwatch w;
      works[i]();
      times[i].push_back(w.seconds());
    }
  }
  std::vector<Stats> out;
  for (auto& t : times) out.push_back(stats_of(t));
  return out;
}

double load_average() {
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  return load;
}

std::string load_text() {
  return fmt::format("load average {:.2f} on {} cores, {} time", load_average(),
                     allowed_cores().size(), clock_chosen == Clock::kWall ? "wall" : "thread CPU");
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

void check_only(const char* command, const std::string& only,
                const std::vector<std::string>& names) {
  for (const std::string& name : names)
    if (name.find(only) != std::string::npos) return;
  throw UserError(fmt::format("bench {}: --only {}: none of these has it in its name: {}", command,
                              only, fmt::join(names, "; ")));
}

std::string time_text(double s) {
  if (s < 1e-6) return fmt::format("{:.1f} ns", s * 1e9);
  if (s < 1e-3) return fmt::format("{:.2f} us", s * 1e6);
  if (s < 1) return fmt::format("{:.3f} ms", s * 1e3);
  return fmt::format("{:.2f} s", s);
}

std::string bytes_text(int64_t bytes) {
  if (bytes >= int64_t(1) << 20) return fmt::format("{} MiB", bytes >> 20);
  if (bytes >= 1024) return fmt::format("{} KiB", bytes >> 10);
  return fmt::format("{} B", bytes);
}

}  // namespace tessera::bench
