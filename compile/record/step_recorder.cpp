#include "compile/record/step_recorder.h"

#include <algorithm>
#include <thread>

#include "compile/ir/as_strided.h"
#include "compile/ir/verify.h"
#include "core/autograd/graph.h"
#include "core/dispatch/call.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/plan_cache.h"
#include "core/tensor/ready_lock.h"

namespace tessera::compiler {

// The event that promised tensors wait for: waiting for it runs the segment. It may outlive the
// recorder, held by tensors that were never computed.
class StepRecorder::Promise final : public Event {
 public:
  explicit Promise(StepRecorder* recorder, bool only_read = false)
      : only_read_(only_read), recorder_(recorder) {}
  bool done() const override { return false; }
  void wait() override {
    bool elsewhere = std::this_thread::get_id() != thread_;
    // What is put off only reads, so another thread may read too.
    if (elsewhere && only_read_) return;
    if (!recorder_) throw UserError("compile: this value was never computed: " + why_);
    TESSERA_CHECK(!elsewhere,
                  "compile: what another thread records writes this memory; wait for its call to "
                  "return");
    recorder_->values_read("the memory of a tensor is read");
  }
  void give_up(std::string why) { recorder_ = nullptr, why_ = std::move(why); }

 private:
  const std::thread::id thread_ = std::this_thread::get_id();
  const bool only_read_;
  StepRecorder* recorder_;
  std::string why_;
};

StepRecorder::StepRecorder(const TraceOptions& options, RunSegment run,
                           std::span<const Tensor> arguments)
    : TraceBackend({}, "compile"),
      options_(options),
      run_(std::move(run)),
      promise_(new Promise(this)),
      reading_(new Promise(this, true)) {
  TESSERA_CHECK(!context().backend, "compile: this thread runs another backend already");
  begin_graph(options_);
  for (const Tensor& t : options_.inputs) meets(t);  // the first read of an input is then noticed
  for (const Tensor& t : arguments) known_handles_.insert(t.impl());
  recording_.emplace(target());
}

StepRecorder::~StepRecorder() {
  try {
    finish();
  } catch (const std::exception&) {  // promises were given up; an error is on its way already
  }
}

// ---- ops

Tensors StepRecorder::run(const PrimRef& prim, Inputs in) {
  for (const Tensor& t : in)
    if (t.device().is_meta()) {
      EagerScope eager;
      return eager_backend().run(prim, in);
    }
  if (!prim->is_view() && !find_kernel(*prim, device_of(*prim, in))) {
    TESSERA_CHECK(prim->decomposable(), "{}: no kernel for {} and no decomposition", prim->name(),
                  to_string(device_of(*prim, in)));
    Scoped<LayerMask> below_all_layers(context().enabled, 0);
    return prim->decompose(in);
  }
  return TraceBackend::run(prim, in);
}

Tensors StepRecorder::execute(const PrimRef& prim, Inputs in) {
  Tensors out;
  if (prim->is_view()) {
    out = prim->view(in);
  } else {
    const Kernel& kernel = find_kernel(*prim, device_of(*prim, in));
    // The executor copies what is on the host to the device for a kernel that does not take it.
    const Device device = device_of(*prim, in);
    SmallVector<Tensor, 4> planned(in.begin(), in.end());
    if (!device.is_cpu() && !kernel.host_scalars)
      for (Tensor& t : planned)
        if (may_be_on_host(*prim, t.meta()))
          t = Tensor(Meta::contiguous(t.shape(), t.dtype(), device), nullptr);
    KernelCall call = PlanCache::plan_for_thread(prim, kernel, planned);
    for (const Meta& m : call.out) {
      size_t bytes = size_t(extent_of(m, 0).size) * size_of(m.dtype);
      out.push_back(Tensor(m, Ref<Storage>(new Storage(bytes, m.device, promise_))));
    }
  }
  if (context().inference)
    for (Tensor& t : out) t.impl()->inference = true;
  return out;
}

void StepRecorder::write(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  check_destinations(*prim, dst, prim->infer(metas_of(in)));
  std::lock_guard lock(ready_lock());
  for (const Tensor& d : dst) {
    d.storage()->bump_version();
    d.storage()->set_ready(promise_);
  }
}

// Makes the memory of `t` pending, so that nothing reads or changes it without the recorder's
// notice.
bool StepRecorder::meets(const Tensor& t) {
  Storage& s = *t.storage();
  std::lock_guard lock(ready_lock());
  if (own(s.ready())) return false;
  TESSERA_CHECK(!dynamic_cast<Promise*>(s.ready().get()),
                "compile: {} is part of what another thread records; give each rank tensors of its "
                "own",
                describe(t));
  met_.push_back({t.storage(), s.ready()});
  s.set_ready(reading_);
  return true;
}

bool StepRecorder::own(const Ref<Event>& ready) const {
  return ready == promise_ || ready == reading_;
}

// Restores the event that each memory was waiting for before the recording.
void StepRecorder::leave(const std::vector<Met>& met) {
  std::lock_guard lock(ready_lock());
  for (const Met& m : met)
    if (own(m.storage->ready())) m.storage->set_ready(m.before);
}

// ---- what the program does besides ops

void StepRecorder::notice(const HostEvent& event) {
  std::visit([this](const auto& e) { on(e); }, event);
}

void StepRecorder::on(const events::LeavesOps& event) { looked_at(event.what()); }
void StepRecorder::on(const events::ValueRead& event) {
  values_read(fmt::format("item() at {}:{}", event.where.file_name(), event.where.line()));
}
void StepRecorder::on(const events::CustomFunctionRuns& event) {
  if (event.begins)
    functions_.emplace_back(event.name);
  else
    functions_.pop_back();
}

void StepRecorder::values_read(std::string what) {
  if (!functions_.empty())
    what += fmt::format(
        " in the custom function {}; an opaque op (custom_op in core/autograd/custom_op.h) is a "
        "node of the graph instead",
        functions_.back());
  looked_at(what);
}

void StepRecorder::looked_at(const std::string& why) {
  if (break_.empty()) {
    std::string scope =
        graph_.nodes.empty() ? "" : graph_.scopes[size_t(graph_.nodes.back().scope)];
    break_ = scope.empty() ? why : fmt::format("{}, after ops of {}", why, scope);
  }
  flush();
}

void StepRecorder::on(const events::SlotRead& event) {
  for (TouchedSlot& s : slots_)
    if (s.owner.get() == &event.owner) return;
  slots_.push_back(
      {.owner = Ref<const RefCounted>(&event.owner), .seen = &event.slot, .before = event.slot});
}

void StepRecorder::on(const events::SlotChange& event) {
  for (TouchedSlot& s : slots_)
    if (s.owner.get() == &event.owner) {
      s.changed = &event.slot;
      return;
    }
  slots_.push_back({.owner = Ref<const RefCounted>(&event.owner),
                    .seen = &event.slot,
                    .changed = &event.slot,
                    .before = event.slot,
                    .depends = event.now.defined()});
}

TouchedSetting& StepRecorder::setting(const RefCounted& owner, const int64_t& value, bool read) {
  auto [known, fresh] = setting_of_.try_emplace(&value, settings_.size());
  if (fresh)
    settings_.push_back({.owner = Ref(&owner), .seen = &value, .before = value, .depends = read});
  return settings_[known->second];
}
void StepRecorder::on(const events::SettingRead& event) { setting(event.owner, event.value, true); }
void StepRecorder::on(const events::SettingChange& event) {
  setting(event.owner, event.value, false).changed = &event.value;
}

HandleState state_of(const Tensor& handle) {
  const GradMeta* meta = grad_meta(handle);
  return meta ? HandleState{meta, meta->sink, meta->replaced} : HandleState();
}

// Notes the handles that were there before; those on memory that the recording makes are its own.
void StepRecorder::on(const events::HandlesRead& event) {
  for (const Tensor& t : event.handles) {
    const Storage* storage = local_of(t).storage().get();
    if (!storage || !storage->data() || !known_handles_.insert(t.impl()).second) continue;
    handles_.push_back({t, state_of(t)});
  }
  if (handles_.size() >= forget_handles_at_) forget_handles();
}

// Forgets handles that only the recorder holds: they were temporary.
void StepRecorder::forget_handles() {
  std::erase_if(handles_, [&](const TouchedHandle& h) {
    if (h.handle.impl()->use_count() > 1) return false;
    known_handles_.erase(h.handle.impl());
    return true;
  });
  forget_handles_at_ = std::max<size_t>(256, 2 * handles_.size());
}

// ---- segments

// Returns one tensor for each promised memory that is held outside of the recording.
std::vector<Tensor> StepRecorder::visible() {
  forget_unreachable();
  std::vector<std::pair<ValueId, Tensor>> found;
  for (auto& [storage, memory] : memory_) {
    if (memory.storage->data() || memory.storage->ready() != promise_) continue;
    if (memory.storage->use_count() == 1) continue;
    ValueId buffer = graph_[memory.layouts[0].id].buffer;
    found.emplace_back(buffer, Tensor(graph_[buffer].meta, memory.storage));
  }
  std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::vector<Tensor> tensors;
  for (auto& [id, t] : found) tensors.push_back(std::move(t));
  return tensors;
}

// A promised tensor begins at the start of its memory, but a result of the interpreter may lie
// somewhere in an operand's memory; such a result is copied.
Tensor laid_out_as(const Meta& promised, const Tensor& t) {
  if (t.offset() == 0 && t.strides() == promised.strides) return t;
  Tensor copy = empty(promised);
  copy_values(copy, t);
  return copy;
}

// Runs the segment and restores versions, since its writes were counted when they were recorded.
Tensors StepRecorder::run_segment(Graph graph, const std::vector<Met>& met) {
  std::vector<uint32_t> versions;
  for (const Met& m : met) versions.push_back(m.storage->version());
  Tensors results = run_(std::move(graph), options_.inputs);
  for (size_t i = 0; i < met.size(); ++i) met[i].storage->set_version(versions[i]);
  return results;
}

void StepRecorder::flush() {
  EagerScope eager;
  forget_handles();
  std::vector<Tensor> seen = visible();
  bool anything = !graph_.nodes.empty();
  Graph graph = TraceBackend::finish(seen);
  std::vector<Met> met = std::exchange(met_, {});
  leave(met);
  if (anything) {
    ++segments_;
    provided_.clear();
    try {
      verify(graph);
      last_ = graph;
      Tensors results = run_segment(std::move(graph), met);
      for (size_t i = 0; i < seen.size(); ++i) {
        seen[i].storage()->provide(laid_out_as(seen[i].meta(), results[i]).storage());
        provided_.push_back(seen[i].storage());
      }
    } catch (const std::exception& e) {
      promise_->give_up(e.what());
      promise_ = Ref<Promise>(new Promise(this));
      begin_graph(options_);
      throw;
    }
  }
  begin_graph(options_);
}

void StepRecorder::finish() {
  if (!recording_) return;
  recording_.reset();
  auto stop = [this] {
    leave(std::exchange(met_, {}));
    promise_->give_up("its recording is over");
    reading_->give_up("its recording is over");
  };
  try {
    flush();
  } catch (...) {
    stop();
    throw;
  }
  stop();
  for (TouchedSlot& s : slots_) s.after = *s.seen;
  for (TouchedSetting& s : settings_) s.after = *s.seen;
}

}  // namespace tessera::compiler
