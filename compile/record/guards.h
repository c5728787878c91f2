// Guards: what a finished recording says about running its graph in place of the program, namely
// what must still hold, and where results and other lasting effects of the call go. Two recordings
// confirm each other; what differs between them (a tensor made from values of the program, an
// argument that is also reached in another way) cannot be replayed by the graph.
#pragma once
#include <any>
#include <string>
#include <unordered_map>
#include <vector>

#include "compile/record/call_key.h"
#include "compile/record/step_recorder.h"

namespace tessera::compiler {

struct CachedCall;

/// Holds a reference to each object that guards look at, one however many guards share it, so that
/// its reference count tells whether it is held elsewhere.
class GuardedObjects {
 public:
  template <class T>
  T* keep(T* object) {
    kept_.try_emplace(object, Ref<const RefCounted>(object));
    return object;
  }
  /// Releases objects that no guard of `entries` refers to.
  void keep_only(std::span<const CachedCall* const> entries);
  void clear() { kept_.clear(); }

 private:
  std::unordered_map<const RefCounted*, Ref<const RefCounted>> kept_;
};

// Says where a tensor that leaves a run comes from.
struct Source {
  enum Kind : uint8_t { kNone, kOutput, kInput, kExisting } kind = kNone;
  size_t index = 0;  // of outputs or inputs
  Tensor like;       // kExisting: the tensor; kOutput, kInput: its layout, placement, no values
  int64_t offset = 0;
  bool fresh = false;      // kExisting: each call makes a new handle on that memory
  bool inference = false;  // it was made in inference mode
};
/// Returns the tensor described by `source` for a run with these outputs and inputs.
Tensor give(const Source& source, const Tensors& outputs, std::span<const Tensor> inputs);

// The structs below refer to objects that a GuardedObjects keeps alive.
struct CachedSlot {
  const RefCounted* owner;
  const Tensor* seen = nullptr;
  Tensor* changed = nullptr;  // the same place; null when it is only read
  Source after = {};
  bool depends = false;  // the call depends on what the slot held: `before`
  Tensor before = {};
};
struct CachedSetting {
  const RefCounted* owner;
  const int64_t* seen = nullptr;
  int64_t* changed = nullptr;
  int64_t before = 0, after = 0;
  bool depends = true;
  bool operator==(const CachedSetting&) const = default;
};
struct CachedHandle {
  const TensorImpl* handle;
  HandleState before;
  bool operator==(const CachedHandle&) const = default;
};

/// A recorded call with its guards.
struct CachedCall {
  CallKey key = {};
  bool confirmed = false;                 // a second recording agreed
  std::vector<Ref<Storage>> inputs = {};  // of the last recording
  std::vector<bool> any = {};             // inputs that may be other memory than `inputs`
  CallKey returned = {};                  // what the call returned besides tensors
  std::any like = {};
  std::vector<CachedSetting> settings = {};
  std::vector<CachedHandle> handles = {};
  std::vector<CachedSlot> slots = {};
  std::vector<Tensor> implicit = {};
  std::vector<const Storage*> reached = {};  // memory of `implicit`, sorted
  std::vector<Source> results = {};
};

/// Fills `entry` except for key, inputs and what is returned besides tensors. Returns why the
/// program has to run at each call; "" when `entry` can replace it. `inputs`: what the recording
/// was given.
std::string make_guards(const StepRecorder& recorder, std::span<const Tensor> inputs,
                        const Tensors& results, GuardedObjects& guarded, CachedCall& entry);

/// True when the graph of `entry` still does what the program does. The second form also checks the
/// inputs.
bool guards_hold(const CachedCall& entry);
bool guards_hold(const CachedCall& entry, std::span<const Tensor> inputs);
/// False when the guards can never hold again: a handle that they depend on has changed or is gone.
bool guards_may_hold(const CachedCall& entry);
/// True when two recordings with the same key and the same graph have the same guards.
bool same_guards(const CachedCall& a, const CachedCall& b);

}  // namespace tessera::compiler
