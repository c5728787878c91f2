// Tools for tests of which thread wakes which: finding out whether other threads sleep, and ending
// waits of threads that are not woken.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/process_group.h"

namespace tessera::test {

inline std::string thread_file(const std::string& thread, const char* name) {
  std::ifstream in("/proc/self/task/" + thread + "/" + name);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

/// Threads of this process that are called `name`.
inline std::vector<pid_t> threads_called(const std::string& name) {
  std::vector<pid_t> found;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    const std::string id = thread.path().filename();
    if (thread_file(id, "comm") == name + "\n") found.push_back(pid_t(std::stoi(id)));
  }
  return found;
}

/// Waits until `thread` sleeps: it has then seen what others did before, and continues when it is
/// woken or its time is over. Returns false if it ends instead.
inline bool await_sleep(pid_t thread) {
  for (;; std::this_thread::sleep_for(std::chrono::microseconds(100))) {
    const std::string stat = thread_file(std::to_string(thread), "stat");
    const size_t name_end = stat.rfind(") ");
    if (name_end == std::string::npos) return false;
    if (stat[name_end + 2] == 'S') return true;
  }
}

/// Whether `work` ends within a minute. It polls, which does not count as waiting.
inline bool is_done(const Work& work) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!work.done() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return work.done();
}

/// Aborts `group` after a minute, unless it is destroyed before, so that a wait in vain ends with
/// an error.
class Rescue {
 public:
  explicit Rescue(ProcessGroup& group)
      : thread_([this, &group] {
          std::unique_lock lock(mutex_);
          if (!ended_.wait_for(lock, std::chrono::minutes(1), [&] { return over_; }))
            group.abort("a call has not ended in a minute");
        }) {}
  ~Rescue() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    ended_.notify_all();
    thread_.join();
  }
  Rescue(const Rescue&) = delete;
  Rescue& operator=(const Rescue&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace tessera::test
