// How everything in bench is timed: on one bound core, after warm-up, as the median of several
// samples; ratios are of samples taken in turn (A B A B), so that a machine that slows down slows
// both. Invariant: every number that is printed was measured in the same run.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::bench {

/// Quartiles of some samples, in the samples' unit.
struct Stats {
  double q1 = 0, median = 0, q3 = 0, min = 0, max = 0;
  int samples = 0;
};
Stats stats_of(std::vector<double> samples);

/// The median of samples of unknown distribution, with its interval of at least 95 %: order
/// statistics by the binomial distribution (sign test). It needs 6 samples; with fewer the interval
/// is unbounded.
struct Interval {
  double median = 0, low = 0, high = 0;
};
Interval median_interval(std::vector<double> samples);

inline constexpr int kSamples = 9;         // least number of samples of a median
inline constexpr int kMostThreads = 1024;  // most that a flag may request

/// What a Stopwatch measures: wall time, or the processor time of the calling thread, which on a
/// shared machine is nearer to what a quiet one would show. The latter is only for measures of one
/// thread; every result says which it is.
enum class Clock { kWall, kThread };
void set_clock(Clock clock);
Clock clock_in_use();
double now_seconds();

class Stopwatch {
 public:
  double seconds() const { return now_seconds() - start_; }

 private:
  double start_ = now_seconds();
};

/// Binds the calling thread (and threads it starts) to core `cpu`; -1: the last core it may use.
/// Returns the core. Throws UserError when the core is not allowed.
int bind_to_core(int cpu = -1);
/// Lets the calling thread use all cores that it could use when the program began.
void unbind();
/// The cores that this process was allowed to use when it began.
std::vector<int> allowed_cores();

/// Returns the seconds that one call takes; batch(n) makes n calls, with n such that they fill
/// `sample_seconds`.
Stats time_batches(const std::function<void(int64_t)>& batch, int samples, double sample_seconds);
/// Returns the seconds that one call of `work` takes; each sample repeats it for at least
/// `sample_seconds`.
template <class F>
Stats time_call(F&& work, int samples = kSamples, double sample_seconds = 0.01) {
  auto batch = [&](int64_t n) {
    for (int64_t i = 0; i < n; ++i) work();
  };
  return time_batches(batch, samples, sample_seconds);
}
/// Times several pieces of work in turn, one call for each sample: sample i of all, then sample i +
/// 1 of all. `before` is called before each, if it is given, and is not timed.
std::vector<Stats> time_in_turn(const std::vector<std::function<void()>>& works, int samples,
                                const std::function<void()>& before = nullptr);

/// Returns "load average 1.90 on 2 cores, wall time": other programs' work influences every number.
std::string load_text();
double load_average();
/// The model name of the CPU; "unknown" where the system does not say.
std::string cpu_name();

/// Keeps the compiler from removing the computation of a value.
template <class T>
void keep(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

/// Checks the option --only: throws UserError that lists `names` unless one of them contains
/// `only`.
void check_only(const char* command, const std::string& only,
                const std::vector<std::string>& names);

/// "1.23 ms", "45.6 ns".
std::string time_text(double seconds);
/// "4 KiB", "100 MiB".
std::string bytes_text(int64_t bytes);

}  // namespace tessera::bench
