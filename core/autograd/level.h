// A level of a function transform: a backend that stands for the world outside. While a function
// runs at a level, its tensors are wrappers (core/tensor/wrapped.h). The layers above the backend
// record what is differentiated at this level; the backend unwraps operands and hands each op to
// the whole dispatch path of the level outside. So transforms nest in any order, outer levels see
// ordinary ops, and a trace sees what is left at the bottom. Invariants: an op never mixes levels;
// an operand from further out is the same value for every sample; an observer outside is told all
// that happens at the level, except events about its wrappers alone.
// Internal: not part of the public interface.
#pragma once
#include "core/dispatch/dispatch.h"
#include "core/dispatch/observer.h"
#include "core/dispatch/target.h"
#include "core/tensor/wrapped.h"

namespace tessera {

/// How random ops draw inside vmap.
enum class Randomness : uint8_t {
  kError,      // they are refused
  kSame,       // every sample the same numbers: what the function draws without vmap
  kDifferent,  // each its own: what the function draws when it is given the whole batch
};

class Level final : public Backend, public Observer, public RefCounted {
 public:
  /// A level that only differentiates.
  Level() = default;
  /// A level of vmap: wrappers may be batches of `size` samples.
  Level(int64_t size, Randomness randomness) : batch_(size), randomness_(randomness) {}

  Tensors run(const PrimRef& prim, Inputs in) override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;
  void notice(const HostEvent& event) override;

  bool vectorizes() const { return batch_ >= 0; }
  /// The number of samples; -1 where the level only differentiates.
  int64_t batch() const { return batch_; }
  Randomness randomness() const { return randomness_; }
  /// True while a thread runs at this level, or at one inside it.
  bool in_use() const { return entered_ > 0; }

  /// A wrapper of `inner`, a tensor of the level outside; it has no history at this level.
  Tensor wrap(Tensor inner, bool batched);
  /// The payload of `t` if it is a wrapper of this level, else null.
  const Wrapped* mine(const Tensor& t) const;
  /// `t` as a tensor of this level: itself if it is one, else a wrapper of it that is the same for
  /// every sample. Throws UserError for a tensor of a transform that has returned.
  Tensor adopt(const Tensor& t);
  /// What `t` stands for at the level outside; sets `batched` to whether dim 0 is the batch.
  Tensor inner(const Tensor& t, bool& batched) const;

  /// Runs the calling thread at this level, on top of the one it is at.
  class Enter {
   public:
    explicit Enter(Level& level);
    ~Enter();
    Enter(const Enter&) = delete;
    Enter& operator=(const Enter&) = delete;

   private:
    Level& level_;
    LayerMask enabled_, forced_;
    DispatchTarget target_;
    bool inference_;
    Tensor samples_;
    // What the level itself held when it was entered before, further out.
    LayerMask outer_enabled_, outer_forced_;
    DispatchTarget outer_target_;
    bool outer_inference_;
  };
  /// Runs the calling thread, which is at this level, at the one outside.
  class Outside {
   public:
    explicit Outside(Level& level);

   private:
    BackendScope target_;
    Scoped<LayerMask> enabled_, forced_;
    Scoped<bool> inference_;
  };
  /// While one lives, turning recording off at this level (for its own backward, or inside an op
  /// that is decomposed) does not turn it off at the levels outside.
  class Unrecorded {
   public:
    explicit Unrecorded(Level& level) : unrecorded_(level.unrecorded_, true) {}

   private:
    Scoped<bool> unrecorded_;
  };

 private:
  const int64_t batch_ = -1;
  const Randomness randomness_ = Randomness::kError;
  int entered_ = 0;
  bool unrecorded_ = false;
  // The context outside, while the level is entered.
  DispatchTarget outer_;
  LayerMask outer_enabled_ = 0, outer_forced_ = 0;
  bool outer_inference_ = false;
};

/// The level that the calling thread is at; null outside of all transforms.
Level* current_level();
/// `t` without its history at the current level; histories at the levels outside stay.
Tensor without_history(const Tensor& t);

}  // namespace tessera
