// The output of a run: JSON lines for programs, event files for TensorBoard; for people a progress
// bar on a terminal and plain lines elsewhere. Only rank 0's report writes.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "core/io/event_writer.h"

namespace tessera::train {

struct StepFacts {
  int64_t step = 0;  // from 1
  double loss = 0, lr = 0, grad_norm = 0, step_ms = 0, samples_per_s = 0, tokens_per_s = 0,
         comm_ms = 0;
  int64_t peak_bytes = 0;
  int world_size = 1;
};
struct Validation {
  double loss = 0;
  std::optional<double> accuracy = {};  // share of samples; none if there is no classification
};
struct RunFacts {
  int64_t steps = 0;
  double seconds = 0;
  std::optional<Validation> validation;
  std::string params_xxh128;
};

class Report {
 public:
  /// `metrics`: path of the JSON lines; `tensorboard`: folder of event files; each may be empty. A
  /// run that resumes after `done_steps` keeps what was written for these steps and appends to it.
  /// Throws UserError when they cannot be written. If the disk refuses a write later, that is
  /// reported once and ends the file, not the run.
  Report(bool active, const std::string& metrics, const std::string& tensorboard,
         int64_t total_steps, int64_t done_steps = 0);
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  void step(const StepFacts& facts);
  void validation(int64_t step, const Validation& v);
  void done(const RunFacts& facts);
  /// Prints a line of its own, above the progress bar.
  void line(const std::string& text);

 private:
  void write_metrics(const std::string& json);
  // Calls f(events) if there is an event file.
  template <class F>
  void write_events(F&& f);
  void draw(const StepFacts& facts);
  using Clock = std::chrono::steady_clock;

  bool active_, terminal_;
  std::FILE* metrics_ = nullptr;
  std::optional<io::EventWriter> events_;
  std::string path_;
  int64_t total_, done_;
  bool bar_drawn_ = false;
  Clock::time_point start_ = Clock::now(), last_ = {};
};

}  // namespace tessera::train
