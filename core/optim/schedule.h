// A schedule is a function from the number of the step, from 0, to the learning rate. It has no
// state: a run that resumes at step n needs n only.
#pragma once
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::optim {

class Schedule {
 public:
  Schedule(std::function<double(int64_t)> rate) : rate_(std::move(rate)) {}
  /// The rate of step `step`: opt.set_lr(schedule(step)) before it.
  double operator()(int64_t step) const { return rate_(step); }

 private:
  std::function<double(int64_t)> rate_;
};

Schedule constant(double lr);
/// A line from `from` at step 0 to `to` at `steps`, and `to` after it.
Schedule linear(double from, double to, int64_t steps);
/// As linear, along half a cosine. Loshchilov, Hutter 2017.
Schedule cosine(double from, double to, int64_t steps);
/// lr gamma^(step / every), rounded down.
Schedule step_decay(double lr, int64_t every, double gamma);
/// lr gamma^step.
Schedule exponential(double lr, double gamma);
/// lr gamma^k once k of the ascending `milestones` are reached.
Schedule multi_step(double lr, std::vector<int64_t> milestones, double gamma = 0.1);
/// Falls along half a cosine from lr to `to` in `period` steps, then begins again at lr; each
/// period is `growth` times as long as the one before. Loshchilov, Hutter 2017.
Schedule cosine_warm_restarts(double lr, int64_t period, int64_t growth = 1, double to = 0);
struct OneCycleOptions {
  double rising = 0.3;     // the share of all steps in which the rate rises
  double div_factor = 25;  // it begins at max_lr / div_factor
  double final_div = 1e4;  // it ends at max_lr / div_factor / final_div
};
/// Rises to max_lr and falls to nearly nothing over `steps` steps, along halves of cosines. Smith,
/// Topin 2018; PyTorch's OneCycleLR with two phases.
Schedule one_cycle(double max_lr, int64_t steps, OneCycleOptions options = {});
/// parts[0] until step starts[0], then parts[1], which counts its steps from there, and so on.
/// There is one start fewer than parts.
Schedule sequence(std::vector<Schedule> parts, std::vector<int64_t> starts);
/// Rises as (step + 1) / (steps + 1) to the first rate of `then`, which counts from `steps`.
Schedule warmup(int64_t steps, Schedule then);

struct ScheduleOptions {
  double lr = 1e-3, min_lr = 0;
  int64_t steps = 0;   // in all, warm-up included: min_lr is reached at this step
  int64_t warmup = 0;  // steps
};
/// `kind`: constant, linear or cosine, after a warm-up. Throws UserError for another name or steps
/// <= warmup.
Schedule schedule(std::string_view kind, ScheduleOptions options);

}  // namespace tessera::optim
