#include "core/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/base/error.h"

namespace tessera::optim {
namespace {

double progress(int64_t step, int64_t steps) {
  return double(std::clamp<int64_t>(step, 0, steps)) / double(steps);
}

void check_steps(const char* who, int64_t steps) {
  TESSERA_CHECK(steps > 0, "schedule: {} over {} steps; give at least 1", who, steps);
}

}  // namespace

Schedule constant(double lr) {
  return {[=](int64_t) { return lr; }};
}

Schedule linear(double from, double to, int64_t steps) {
  check_steps("linear", steps);
  return {[=](int64_t step) { return from + (to - from) * progress(step, steps); }};
}

Schedule cosine(double from, double to, int64_t steps) {
  check_steps("cosine", steps);
  return {[=](int64_t step) {
    return to + 0.5 * (1.0 + std::cos(std::numbers::pi * progress(step, steps))) * (from - to);
  }};
}

Schedule step_decay(double lr, int64_t every, double gamma) {
  check_steps("step_decay", every);
  return {[=](int64_t step) { return lr * std::pow(gamma, double(step / every)); }};
}

Schedule exponential(double lr, double gamma) { return step_decay(lr, 1, gamma); }

Schedule multi_step(double lr, std::vector<int64_t> milestones, double gamma) {
  TESSERA_CHECK(std::ranges::is_sorted(milestones), "schedule: milestones of multi_step descend");
  return {[=, milestones = std::move(milestones)](int64_t step) {
    const auto reached = std::ranges::upper_bound(milestones, step) - milestones.begin();
    return lr * std::pow(gamma, double(reached));
  }};
}

Schedule cosine_warm_restarts(double lr, int64_t period, int64_t growth, double to) {
  check_steps("cosine_warm_restarts", period);
  TESSERA_CHECK(growth >= 1, "schedule: periods of cosine_warm_restarts grow by {}; at least by 1",
                growth);
  return {[=](int64_t step) {
    int64_t at = step, now = period;
    if (growth == 1)
      at %= period;
    else
      for (; at >= now; now *= growth) at -= now;
    return cosine(lr, to, now)(at);
  }};
}

Schedule one_cycle(double max_lr, int64_t steps, OneCycleOptions o) {
  check_steps("one_cycle", steps);
  TESSERA_CHECK(o.rising >= 0 && o.rising <= 1 && o.div_factor > 0 && o.final_div > 0,
                "schedule: one_cycle rises for a share {} from a part {} and ends at one of {}",
                o.rising, o.div_factor, o.final_div);
  const double first = max_lr / o.div_factor, last = first / o.final_div,
               top = o.rising * double(steps) - 1, end = double(steps - 1);
  auto between = [](double from, double to, double share) {
    return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * std::clamp(share, 0.0, 1.0)));
  };
  return {[=](int64_t step) {
    const double at = double(step);
    if (at <= top) return between(first, max_lr, top > 0 ? at / top : 1);
    return between(max_lr, last, end > top ? (at - top) / (end - top) : 1);
  }};
}

Schedule sequence(std::vector<Schedule> parts, std::vector<int64_t> starts) {
  TESSERA_CHECK(parts.size() == starts.size() + 1 && std::ranges::is_sorted(starts),
                "schedule: sequence of {} parts needs {} ascending starts, got {}", parts.size(),
                parts.size() - 1, starts.size());
  return {[parts = std::move(parts), starts = std::move(starts)](int64_t step) {
    size_t i = size_t(std::ranges::upper_bound(starts, step) - starts.begin());
    return parts[i](i == 0 ? step : step - starts[i - 1]);
  }};
}

Schedule warmup(int64_t steps, Schedule then) {
  TESSERA_CHECK(steps >= 0, "schedule: warm-up over {} steps", steps);
  return {[=, then = std::move(then)](int64_t step) {
    if (step >= steps) return then(step - steps);
    return then(0) * double(step + 1) / (double(steps) + 1);
  }};
}

Schedule schedule(std::string_view kind, ScheduleOptions o) {
  if (kind == "constant") return warmup(o.warmup, constant(o.lr));
  TESSERA_CHECK(kind == "linear" || kind == "cosine",
                "schedule: \"{}\" is not constant, linear or cosine", kind);
  TESSERA_CHECK(o.warmup >= 0, "schedule: warm-up over {} steps", o.warmup);
  TESSERA_CHECK(o.steps > o.warmup, "schedule: {} steps in all leave none after a warm-up of {}",
                o.steps, o.warmup);
  auto falling = kind == "linear" ? linear : cosine;
  return warmup(o.warmup, falling(o.lr, o.min_lr, o.steps - o.warmup));
}

}  // namespace tessera::optim
