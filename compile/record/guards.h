// What a finished recording says about running its graph in the place of the program: what must
// still hold, and where results and what outlives the call go. Two recordings make one entry: what
// differs between them (a tensor made from values of the program, an argument that is also reached
// in another way) is not the graph's to replay.
#pragma once
#include <any>
#include <string>
#include <unordered_map>
#include <vector>

#include "compile/record/call_key.h"
#include "compile/record/step_recorder.h"

namespace tessera::compiler {

struct CachedCall;

/// Keeps what guards look at, once however many guards do, so that its count tells whether anybody
/// else has it still.
class GuardedObjects {
 public:
  template <class T>
  T* keep(T* object) {
    kept_.try_emplace(object, Ref<const RefCounted>(object));
    return object;
  }
  /// Lets go of what these do not refer to.
  void keep_only(std::span<const CachedCall* const> entries);
  void clear() { kept_.clear(); }

 private:
  std::unordered_map<const RefCounted*, Ref<const RefCounted>> kept_;
};

// Where a tensor that leaves a run comes from.
struct Source {
  enum Kind : uint8_t { kNone, kOutput, kInput, kExisting } kind = kNone;
  size_t index = 0;  // of outputs or inputs
  Tensor like;       // kExisting: the tensor; kOutput, kInput: its layout, placement, no values
  int64_t offset = 0;
  bool fresh = false;      // kExisting: a handle of its own on that memory, made by each call
  bool inference = false;  // it was made in inference mode
};
/// The tensor that leaves a run with these outputs and inputs.
Tensor give(const Source& source, const Tensors& outputs, std::span<const Tensor> inputs);

// What follows refers to objects that a GuardedObjects keeps.
struct CachedSlot {
  const RefCounted* owner;
  const Tensor* seen = nullptr;
  Tensor* changed = nullptr;  // the same place; null when it is only read
  Source after = {};
  bool depends = false;  // on what it held: `before`
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

/// A call that is known.
struct CachedCall {
  CallKey key = {};
  bool confirmed = false;                 // by a second recording
  std::vector<Ref<Storage>> inputs = {};  // of the last recording
  std::vector<bool> any = {};             // which inputs may be other memory than those
  CallKey returned = {};                  // besides tensors
  std::any like = {};
  std::vector<CachedSetting> settings = {};
  std::vector<CachedHandle> handles = {};
  std::vector<CachedSlot> slots = {};
  std::vector<Tensor> implicit = {};
  std::vector<const Storage*> reached = {};  // memory of `implicit`, sorted
  std::vector<Source> results = {};
};

/// Fills `entry` but for key, inputs and what is returned besides tensors; why the program has to
/// run at each call, "" when `entry` can take its place. `inputs`: what the recording was given.
std::string make_guards(const StepRecorder& recorder, std::span<const Tensor> inputs,
                        const Tensors& results, GuardedObjects& guarded, CachedCall& entry);

/// True when the graph of `entry` still says what the program does; with which inputs.
bool guards_hold(const CachedCall& entry);
bool guards_hold(const CachedCall& entry, std::span<const Tensor> inputs);
/// False when it never will again: a handle that it depends on has changed or is gone.
bool guards_may_hold(const CachedCall& entry);
/// True when two recordings of one key, which are one graph, say the same.
bool same_guards(const CachedCall& a, const CachedCall& b);

}  // namespace tessera::compiler
