#include "launcher/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>

#include "launcher/placement.h"

namespace tessera::launcher {
namespace {

constexpr size_t kShownLines = 12;
constexpr size_t kShownColumns = 400;

/// The last lines of a worker's output, indented, without what a carriage return overwrote.
std::string last_lines(const std::string& tail) {
  std::vector<std::string> lines;
  size_t begin = 0;
  while (begin < tail.size()) {
    size_t end = std::min(tail.find('\n', begin), tail.size());
    std::string line = tail.substr(begin, end - begin);
    begin = end + 1;
    while (!line.empty() && line.back() == '\r') line.pop_back();
    size_t redraw = line.rfind('\r');
    if (redraw != std::string::npos) line.erase(0, redraw + 1);
    if (line.size() > kShownColumns) line = line.substr(0, kShownColumns) + "...";
    if (!line.empty()) lines.push_back(line);
  }
  std::string text;
  size_t first = lines.size() - std::min(lines.size(), kShownLines);
  for (size_t i = first; i < lines.size(); ++i) text += "    | " + lines[i] + "\n";
  return text;
}

bool contains(const std::vector<Worker*>& workers, const Worker* worker) {
  return std::ranges::find(workers, worker) != workers.end();
}

}  // namespace

std::string rank_list(const std::vector<int>& ranks) { return cpu_list(ranks); }

long count_memory_kills() {
  std::ifstream file("/proc/vmstat");
  std::string name;
  for (long value; file >> name >> value;)
    if (name == "oom_kill") return value;
  return -1;
}

std::string failure_report(const std::vector<std::unique_ptr<Worker>>& workers,
                           const std::vector<Worker*>& failed, bool out_of_memory,
                           const std::string& on_host, const Console& console) {
  const Worker& first = *failed.front();
  const std::string lines = last_lines(first.tail);
  const bool repeat = !lines.empty() && !first.in_view(console);
  std::string text;
  for (const auto& worker : workers)
    if (worker->absent != Worker::Absent::kNo && !contains(failed, worker.get()))
      text += fmt::format("tlaunch: rank {}{} held up the others, who gave it up: {} (pid {})\n",
                          worker->rank, on_host,
                          worker->absent == Worker::Absent::kStopped
                              ? "a signal had stopped it"
                              : "it was still running; its output or a debugger may say why",
                          worker->pid);
  text += fmt::format("tlaunch: rank {}{} failed first: {} after {:.1f} s (pid {}){}\n", first.rank,
                      on_host, first.how(), first.ended_s, first.pid,
                      repeat          ? ""
                      : lines.empty() ? "; it printed nothing"
                                      : "; its last lines are above");
  if (first.exit_code() == 128 + SIGKILL && out_of_memory)
    text += "tlaunch: the kernel killed a process for lack of memory meanwhile; use less of it\n";
  if (repeat) text += fmt::format("tlaunch: last output of rank {}:\n{}", first.rank, lines);
  std::map<std::string, std::vector<int>> groups;
  for (const auto& worker : workers) {
    if (worker.get() == &first) continue;
    bool own = contains(failed, worker.get());
    std::string fate = own                ? "failed later: " + worker->how()
                       : worker->failed() ? "stopped by tlaunch: " + worker->how()
                                          : "finished";
    groups[fate].push_back(worker->rank);
  }
  for (const auto& [fate, ranks] : groups)
    text += fmt::format("tlaunch: rank{} {}{} {}\n", ranks.size() > 1 ? "s" : "", rank_list(ranks),
                        on_host, fate);
  return text;
}

}  // namespace tessera::launcher
