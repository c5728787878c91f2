#include "examples/train/report.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "core/base/error.h"
#include "core/io/file.h"

namespace tessera::train {
namespace {

// Least time between updates of a terminal.
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr auto kLine = std::chrono::seconds(5);  // the same for other outputs

// JSON has no NaN; null means that there is no number.
nlohmann::json number(double v) {
  return std::isfinite(v) ? nlohmann::json(v) : nlohmann::json(nullptr);
}

std::string text_of(const Validation& v) {
  std::string text = fmt::format("validation loss {:.4f}", v.loss);
  if (v.accuracy) text += fmt::format(", accuracy {:.2f} %", 100 * *v.accuracy);
  return text;
}

std::string clock_text(double seconds) {
  int64_t s = int64_t(seconds);
  return s < 3600 ? fmt::format("{:02}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

// Removes what a killed run wrote after the step it is resumed from, torn lines included: it will
// be written again.
void keep_lines_until(const std::string& path, int64_t done) {
  if (!std::filesystem::is_regular_file(path)) return;
  std::string kept;
  std::istringstream lines(io::read_file(path, "train"));
  for (std::string line; std::getline(lines, line);) {
    auto j = nlohmann::json::parse(line, nullptr, false);
    bool keep = j.is_object() && j.contains("step") && j["step"].is_number() && j["step"] <= done;
    if (keep) kept += line + "\n";
  }
  io::write_file(path, kept, "train");
}

void tell_events(io::EventWriter& events, int64_t step, const Validation& v) {
  events.scalar(step, "validation/loss", v.loss);
  if (v.accuracy) events.scalar(step, "validation/accuracy", *v.accuracy);
}

}  // namespace

Report::Report(bool active, const std::string& metrics, const std::string& tensorboard,
               int64_t total, int64_t done)
    : active_(active), terminal_(isatty(1) == 1), path_(metrics), total_(total), done_(done) {
  if (!active_) return;
  if (!tensorboard.empty()) {
    io::EventWriterOptions o;
    o.purge_from = done + 1;  // also if an earlier run left no step to resume from
    events_.emplace(tensorboard, o);
  }
  if (metrics.empty()) return;
  if (done > 0) keep_lines_until(metrics, done);
  io::detach(metrics, "train: --metrics");
  metrics_ = std::fopen(metrics.c_str(), done > 0 ? "a" : "w");
  TESSERA_CHECK(metrics_, "train: --metrics {}: {}", metrics, std::strerror(errno));
}

Report::~Report() {
  if (bar_drawn_) std::fputs("\n", stdout);
  if (metrics_) std::fclose(metrics_);
}

void Report::write_metrics(const std::string& json) {
  if (!metrics_) return;
  if (std::fprintf(metrics_, "%s\n", json.c_str()) > 0 && std::fflush(metrics_) == 0) return;
  line(fmt::format("warning: --metrics {}: {}; the run goes on, the file ends here", path_,
                   std::strerror(errno)));
  std::fclose(std::exchange(metrics_, nullptr));
}

template <class F>
void Report::write_events(F&& f) {
  if (!events_) return;
  try {
    f(*events_);
  } catch (const UserError& e) {
    line(fmt::format("warning: {}; the run goes on, the event file ends here", e.what()));
    events_.reset();
  }
}

void Report::step(const StepFacts& f) {
  if (!active_) return;
  if (metrics_) {
    nlohmann::ordered_json j{{"step", f.step},
                             {"loss", number(f.loss)},
                             {"lr", f.lr},
                             {"grad_norm", number(f.grad_norm)},
                             {"step_ms", f.step_ms},
                             {"samples_per_s", f.samples_per_s},
                             {"tokens_per_s", f.tokens_per_s},
                             {"comm_ms", f.comm_ms},
                             {"peak_bytes", f.peak_bytes},
                             {"world_size", f.world_size}};
    write_metrics(j.dump());
  }
  if (events_) {
    const io::EventWriter::Scalar values[] = {{"train/loss", f.loss},
                                              {"train/lr", f.lr},
                                              {"train/grad_norm", f.grad_norm},
                                              {"speed/step_ms", f.step_ms},
                                              {"speed/samples_per_s", f.samples_per_s},
                                              {"speed/tokens_per_s", f.tokens_per_s},
                                              {"speed/comm_ms", f.comm_ms},
                                              {"memory/peak_bytes", double(f.peak_bytes)}};
    write_events([&](io::EventWriter& events) { events.scalars(f.step, values); });
  }
  auto now = Clock::now();
  bool last = f.step == total_;
  if (f.step != 1 && !last &&
      now - last_ < (terminal_ ? Clock::duration(kRedraw) : Clock::duration(kLine)))
    return;
  last_ = now;
  draw(f);
}

void Report::draw(const StepFacts& f) {
  double elapsed = std::chrono::duration<double>(Clock::now() - start_).count(),
         left = elapsed / double(f.step - done_) * double(total_ - f.step);
  std::string facts = fmt::format(
      "step {}/{}  loss {:.4f}  lr {:.2e}  {:.1f} ms/step  {:.0f} {}/s  {:.0f} MB  {}<{}", f.step,
      total_, f.loss, f.lr, f.step_ms, f.tokens_per_s > 0 ? f.tokens_per_s : f.samples_per_s,
      f.tokens_per_s > 0 ? "tokens" : "samples", double(f.peak_bytes) / 1e6, clock_text(elapsed),
      clock_text(left));
  if (!terminal_) {
    std::printf("%s\n", facts.c_str());
  } else {
    constexpr int kWidth = 20;
    int filled = int(kWidth * f.step / std::max<int64_t>(total_, 1));
    std::string bar;
    for (int i = 0; i < kWidth; ++i) bar += i < filled ? "#" : ".";
    std::printf("\r\x1b[K[%s] %s", bar.c_str(), facts.c_str());
    bar_drawn_ = true;
  }
  std::fflush(stdout);
}

void Report::line(const std::string& text) {
  if (!active_) return;
  std::printf("%s%s\n", bar_drawn_ ? "\r\x1b[K" : "", text.c_str());
  bar_drawn_ = false;
  std::fflush(stdout);
}

void Report::validation(int64_t step, const Validation& v) {
  line(fmt::format("step {}: {}", step, text_of(v)));
  if (!active_) return;
  write_events([&](io::EventWriter& events) { tell_events(events, step, v); });
  nlohmann::ordered_json j{{"event", "eval"}, {"step", step}, {"val_loss", number(v.loss)}};
  if (v.accuracy) j["val_accuracy"] = *v.accuracy;
  write_metrics(j.dump());
}

void Report::done(const RunFacts& f) {
  if (!active_) return;
  if (f.validation)
    write_events([&](io::EventWriter& events) { tell_events(events, f.steps, *f.validation); });
  line(fmt::format("done: {} steps in {:.1f} s{}, parameters {}", f.steps, f.seconds,
                   f.validation ? ", " + text_of(*f.validation) : "", f.params_xxh128));
  const nlohmann::json none = nullptr;
  nlohmann::ordered_json j{
      {"event", "done"},
      {"steps", f.steps},
      {"val_loss", f.validation ? number(f.validation->loss) : none},
      {"val_accuracy",
       f.validation && f.validation->accuracy ? nlohmann::json(*f.validation->accuracy) : none},
      {"params_xxh128", f.params_xxh128},
      {"seconds", f.seconds}};
  write_metrics(j.dump());
}

}  // namespace tessera::train
