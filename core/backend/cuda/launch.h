// Kernels and their launches. A Program is the text of some kernels; a Kernel is one of them with
// the types of its parameters, and finds its function on each card at its first launch there.
// Parameters go by value into the launch, which allocates nothing. Invariant: a launch that the
// card would refuse or misread (no threads, too many, too much shared memory) throws before it is
// enqueued, and names the kernel.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

#include "core/backend/cuda/driver_api.h"
#include "core/backend/cuda/kernels/text.h"
#include "core/tensor/stream.h"

namespace tessera::cuda {

/// What a card needs to run a function of a text.
struct FunctionFacts {
  int registers = 0;          // a thread
  size_t local_bytes = 0;     // a thread: arrays that are indexed, and registers that were spilled
  size_t shared_bytes = 0;    // a block, as the text declares it
  uint32_t most_threads = 0;  // of a block
};

/// A kernel on a card.
struct LoadedKernel {
  std::string name;
  FunctionHandle function = nullptr;
  uint32_t most_threads = 0;                    // of a block
  std::atomic<size_t> granted_dynamic_bytes{};  // of shared memory, that a launch may ask for
};

/// A text of CUDA C++ without includes whose kernels are `extern "C"`. It is compiled for a card,
/// or found compiled, when one of its kernels is first asked for there. Thread-safe; an object
/// outlives the work of its kernels.
class Program {
 public:
  /// `name` stands in errors and in the compiler's log, as a file's would.
  Program(std::string name, std::string text) : name_(std::move(name)), text_(std::move(text)) {}
  /// Unloads the code.
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  const std::string& name() const { return name_; }
  const std::string& text() const { return text_; }

  /// `kernel` on card `device`. Throws UserError with the compiler's log where the text does not
  /// compile; BugError where it has no such kernel.
  LoadedKernel& load(const std::string& kernel, int device);

 private:
  struct OnCard {
    ModuleHandle module = nullptr;
    std::map<std::string, LoadedKernel> kernels;
  };
  const std::string name_, text_;
  std::mutex mutex_;
  std::map<int, OnCard> cards_;
};

/// A kernel whose parameters are not known by type.
class UntypedKernel {
 public:
  UntypedKernel(Program& program, std::string name) : program_(program), name_(std::move(name)) {}
  const std::string& name() const { return name_; }
  FunctionFacts facts(int device);
  /// How many blocks of `threads` and of `dynamic_bytes` of shared memory a multiprocessor of card
  /// `device` runs at once.
  int blocks_per_multiprocessor(int device, uint32_t threads, size_t dynamic_bytes);
  /// Enqueues the kernel on `stream`. `parameters` are the addresses of the values; they have been
  /// read when the call returns. Throws BugError for a geometry that no card runs.
  void launch(const Geometry& geometry, const Stream& stream, void** parameters);

 private:
  static constexpr int kRemembered = 16;  // cards; others cost a look-up for each launch
  LoadedKernel& loaded(int device);
  void grant_dynamic_bytes(LoadedKernel& kernel, size_t bytes, int device);

  Program& program_;
  const std::string name_;
  std::atomic<LoadedKernel*> loaded_[kRemembered]{};
};

/// A kernel whose parameters have the types P, as its text declares them: pointers into a card's
/// memory, numbers, and structs of them.
template <class... P>
class Kernel : public UntypedKernel {
  static constexpr size_t kParameterBytes = 4096;  // what every card takes
  static_assert((std::is_trivially_copyable_v<P> && ...), "parameters are copied as bytes");
  static_assert((sizeof(P) + ... + 0) + 16 * sizeof...(P) <= kParameterBytes);

 public:
  using UntypedKernel::UntypedKernel;
  /// Enqueues the kernel on `stream`, as launch() does.
  void operator()(const Geometry& geometry, const Stream& stream,
                  std::type_identity_t<P>... values) {
    void* parameters[] = {const_cast<void*>(static_cast<const void*>(&values))..., nullptr};
    launch(geometry, stream, parameters);
  }
};

}  // namespace tessera::cuda
