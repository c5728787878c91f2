#include "collectives/mpi/library.h"

#include <algorithm>
#include <cstdlib>

#include "core/base/env.h"
#include "core/base/error.h"

#if TESSERA_HAVE_MPI
#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "core/base/log.h"
#include "core/base/process.h"
#include "core/base/silence.h"
#endif

namespace tessera::detail {

#if TESSERA_HAVE_MPI
namespace {

constexpr const char* kLibrary = "libmpi.so.40";  // Open MPI 4 and 5; we compile with its header
constexpr int64_t kLargest = int64_t{1} << 30;    // MPI counts bytes in an int

void* open_library() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);  // its plug-ins look up its symbols
  TESSERA_CHECK(library, "mpi: cannot load {}: {}; install openmpi-bin", kLibrary, dlerror());
  return library;
}

/// The address of the library's symbol of this name, converted to the type that the caller needs.
struct Symbol {
  void* address;
  Symbol(void* library, const char* name) : address(dlsym(library, name)) {
    TESSERA_CHECK(address, "mpi: {} has no {}; install Open MPI 4 or 5", kLibrary, name);
  }
  template <class T>
  operator T*() const {  // NOLINT(google-explicit-constructor)
    return reinterpret_cast<T*>(address);
  }
};

// Watches calls of MPI that wait for all ranks and accept no deadline. A thread beside such a call
// reports that it waits, and ends the process where the wait is in vain; mpirun then ends the
// others.
class Watch {
 public:
  /// The wait is in vain after `seconds`. If `processes` of all ranks are given, by rank, it may
  /// last as long as they run: it is in vain once a signal has kept one of them stopped for
  /// `seconds`.
  Watch(const char* call, double seconds, std::span<const pid_t> processes = {})
      : call_(call),
        timeout_(std::chrono::duration_cast<Silence::Clock::duration>(
            std::chrono::duration<double>(seconds))),
        processes_(processes),
        looks_(processes.size()),
        thread_([this] { watch(); }) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  static constexpr std::chrono::milliseconds kCheckInterval{250};

  void watch() {
    const auto deadline = Silence::Clock::now() + timeout_;
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, kCheckInterval, [&] { return over_; })) {
      if (silence_.over())
        logging::warn("mpi: {} has waited {:.0f} s for other ranks", call_, silence_.waited());
      if (!processes_.empty())
        look();
      else if (Silence::Clock::now() >= deadline)
        leave("other ranks do not come to it");
    }
  }

  // Counts looks instead of measuring time, since this process may be suspended too.
  void look() {
    for (size_t r = 0; r < processes_.size(); ++r) {
      looks_[r] = is_stopped(processes_[r]) ? looks_[r] + 1 : 0;
      if (looks_[r] * kCheckInterval >= timeout_)
        leave(fmt::format("rank {} is stopped by a signal (process {})", r, processes_[r]));
    }
  }

  [[noreturn]] void leave(const std::string& why) const {
    logging::error(
        "mpi: {} has waited {:.3g} s, and {}; this rank ends, and with it the job; look at the "
        "output of the others",
        call_, silence_.waited(), why);
    _exit(1);
  }

  const char* const call_;
  const Silence::Clock::duration timeout_;
  const std::span<const pid_t> processes_;
  std::vector<int> looks_;  // by process: the last looks in a row that found it stopped
  Silence silence_{timeout_};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

// What the end of the process still needs when everything else is gone.
struct Ending {
  decltype(&MPI_Finalize) finalize;
  std::vector<pid_t> processes;  // of all ranks
};

double join_timeout_s() { return env::get_seconds("TESSERA_JOIN_TIMEOUT", 600); }

}  // namespace

struct Mpi::Functions {
  void* library = open_library();
  decltype(&MPI_Init_thread) Init_thread = Symbol(library, "MPI_Init_thread");
  decltype(&MPI_Finalize) Finalize = Symbol(library, "MPI_Finalize");
  decltype(&MPI_Comm_rank) Comm_rank = Symbol(library, "MPI_Comm_rank");
  decltype(&MPI_Comm_size) Comm_size = Symbol(library, "MPI_Comm_size");
  decltype(&MPI_Comm_set_errhandler) Comm_set_errhandler =
      Symbol(library, "MPI_Comm_set_errhandler");
  decltype(&MPI_Error_string) Error_string = Symbol(library, "MPI_Error_string");
  decltype(&MPI_Isend) Isend = Symbol(library, "MPI_Isend");
  decltype(&MPI_Irecv) Irecv = Symbol(library, "MPI_Irecv");
  decltype(&MPI_Testall) Testall = Symbol(library, "MPI_Testall");
  // The objects that the macros of mpi.h refer to.
  MPI_Comm world = Symbol(library, "ompi_mpi_comm_world");
  MPI_Datatype byte = Symbol(library, "ompi_mpi_byte");
  MPI_Errhandler errors_return = Symbol(library, "ompi_mpi_errors_return");
};
static_assert(sizeof(MPI_Request) == sizeof(Mpi::Request));

void Mpi::check(int error, const char* what) const {
  if (error == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  f_->Error_string(error, text, &length);
  throw UserError(fmt::format("mpi: {} failed: {}", what, text));
}

Mpi::Mpi() {
  TESSERA_CHECK(!env::get("OMPI_COMM_WORLD_SIZE").empty(),
                "mpi: this process was not started by mpirun; use mpirun -n N PROGRAM, or another "
                "backend (shm, gloo)");
  static const Functions functions;
  f_ = &functions;
  int level = 0;
  {
    Watch watch("MPI_Init_thread", join_timeout_s());
    check(f_->Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread");
  }
  TESSERA_CHECK(
      level >= MPI_THREAD_SERIALIZED,
      "mpi: MPI grants thread level {}, and MPI_THREAD_SERIALIZED is needed; use Open MPI "
      "4, or another backend (shm, gloo)",
      level);
  check(f_->Comm_set_errhandler(f_->world, f_->errors_return), "MPI_Comm_set_errhandler");
  check(f_->Comm_rank(f_->world, &rank_), "MPI_Comm_rank");
  check(f_->Comm_size(f_->world, &size_), "MPI_Comm_size");
  // MPI_Finalize waits for all ranks. That is right after a program that succeeded, but a hang
  // after one that failed; a process that exits with an error and without it makes mpirun end the
  // others.
  on_exit(
      [](int status, void* at) {
        if (status != 0) return;
        const Ending& ending = *static_cast<const Ending*>(at);
        Watch watch("MPI_Finalize", env::get_seconds("TESSERA_TIMEOUT", 60), ending.processes);
        ending.finalize();
      },
      new Ending{f_->Finalize, processes_of_ranks()});
}

// Process ids are only valid on one host; a job on several hosts is refused before any rank uses
// them.
std::vector<pid_t> Mpi::processes_of_ranks() {
  std::vector<pid_t> all(size_t(size_), ::getpid());
  std::vector<Request> requests;
  pid_t own = ::getpid();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    begin(true, &own, sizeof own, r, kTag, requests);
    begin(false, &all[size_t(r)], sizeof own, r, kTag, requests);
  }
  Watch watch("the exchange of process numbers", join_timeout_s());
  while (!done(requests)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  return all;
}

void Mpi::begin(bool sends, void* data, int64_t bytes, int rank, int tag,
                std::vector<Request>& requests) {
  std::lock_guard lock(mutex_);
  auto* at = static_cast<std::byte*>(data);
  for (int64_t begin = 0; begin < bytes; begin += kLargest) {
    int n = int(std::min(kLargest, bytes - begin));
    MPI_Request r{};
    check(sends ? f_->Isend(at + begin, n, f_->byte, rank, tag, f_->world, &r)
                : f_->Irecv(at + begin, n, f_->byte, rank, tag, f_->world, &r),
          sends ? "MPI_Isend" : "MPI_Irecv");
    requests.push_back(r);
  }
}

bool Mpi::done(std::span<Request> requests) {
  std::lock_guard lock(mutex_);
  int all = 0;
  check(f_->Testall(int(requests.size()), reinterpret_cast<MPI_Request*>(requests.data()), &all,
                    MPI_STATUSES_IGNORE),
        "MPI_Testall");
  return all;
}

#else

struct Mpi::Functions {};
Mpi::Mpi() {
  throw UserError(
      "mpi: Tessera was built without MPI; install libopenmpi-dev and build again, or start the "
      "program with tlaunch");
}
void Mpi::begin(bool, void*, int64_t, int, int, std::vector<Request>&) {}
bool Mpi::done(std::span<Request>) { return true; }

#endif

Mpi& Mpi::get() {
  static Mpi mpi;
  return mpi;
}

}  // namespace tessera::detail
