// How a kernel that refuses an operand (a class that is not there, a division of integers by zero)
// tells the host, which does not wait for it: the kernel leaves position and value in a word of
// pinned memory, and goes on with zeros in the refused places. The host looks at the words of a
// thread whenever it has waited for one of the thread's streams, and at an op's own word before it
// launches the op, or a graph that has it, again. Invariant: words are never freed, so a kernel may
// write to its word whenever it runs. Every wait for the stream, by any thread, throws the error
// until the thread that owns the stream has received it; then it is cleared.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/base/ref.h"
#include "core/tensor/stream.h"

namespace tessera::cuda {

/// What an op says of an operand that it refuses. `op` and `text` live as long as the program.
struct Refusal {
  std::string_view op;
  const char* text;  // of fmt: {0} the op, {1} the value, {2} its position, {3} and {4} are a and b
  int64_t a = 0, b = 0;
};

/// The word of one op on one stream, for a launch.
class RefusalWord {
 public:
  /// Throws UserError where the word says that an earlier launch refused an operand.
  RefusalWord(const Stream& stream, const Refusal& refusal);
  Report* data() const { return word_; }
  /// To be called after the launch. Waits where TESSERA_CUDA_SYNCHRONOUS=1, and throws UserError
  /// for what was refused.
  void launched() const;
  /// Waits for the launch and throws UserError for what the stream's ops have refused: for an op
  /// whose other kernels rely on what the launch looked at (offsets of segments and of rows).
  void wait() const;

 private:
  Stream stream_;
  Report* word_;
};

/// What ops of one thread have refused, on whatever stream of the thread they ran.
class Refusals : public RefCounted {
 public:
  class Words;
  Refusals();
  ~Refusals() override;
  /// How often the thread was told of refused operands.
  uint32_t thrown() const;
  /// Throws UserError for what ops that have run have refused. To the thread itself it is thrown
  /// once. Other threads also hear what it was told after thrown() was `seen`: what they waited for
  /// is wrong all the same.
  void raise(uint32_t seen);
  /// Lets the next wait of the thread itself throw `error`: what it enqueued got no right values
  /// from a part of the library that runs beside it. Called by any thread.
  void post(std::exception_ptr error);
  /// The calling thread has heard of it in another way.
  void forget_posted() { posted_.store(false, std::memory_order_relaxed); }
  Words& words() { return *words_; }

 private:
  std::unique_ptr<Words> words_;
  std::atomic<bool> posted_{false};
  std::mutex mutex_;
  std::exception_ptr error_;  // while it is posted
};

/// The words of kernels that are captured as one graph. They belong to the graph as long as it
/// lives, and refusals of its launches to the thread that captured it, which alone launches it.
class GraphRefusals {
 public:
  GraphRefusals();
  ~GraphRefusals();
  GraphRefusals(const GraphRefusals&) = delete;
  GraphRefusals& operator=(const GraphRefusals&) = delete;

  /// While one lives, a RefusalWord of the calling thread adds its word to `graph`, and throws
  /// nothing.
  class Scope {
   public:
    explicit Scope(GraphRefusals& graph);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };
  static GraphRefusals* captured();

  Report* add(const Stream& stream, const Refusal& refusal);
  /// To be called before a launch. Throws UserError where an earlier one refused an operand.
  void launches();

 private:
  const Ref<Refusals> of_;
  std::vector<Report*> words_;
};

/// Notes that `stream` is the calling thread's from now on.
void own_stream(const Stream& stream);
/// Those of the thread whose stream that is; null where no thread has taken it.
Ref<Refusals> refusals_of(const Stream& stream);
/// Throws UserError for what ops of the thread of `stream` that have run have refused. Called by
/// whatever waits for the stream.
void raise_refusals(const Stream& stream);

/// TESSERA_CUDA_SYNCHRONOUS=1: the host waits for every kernel, so that an error is thrown where it
/// is made.
bool synchronous();

/// What a word says: the first position that was refused, and its value, held to 32 bits.
struct Refused {
  int64_t position, value;
};
constexpr Refused refused_of(Report word) {
  return {int64_t(~uint32_t(word >> 32)), int32_t(uint32_t(word))};
}

}  // namespace tessera::cuda
