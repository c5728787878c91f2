// A group in front of another group, which sees every call before it is passed on; calls are
// therefore not captured. A subclass overrides only submit. Sub-groups get the same decoration.
#pragma once
#include "collectives/process_group.h"

namespace tessera {

class Decorator : public ProcessGroup {
 public:
  explicit Decorator(Ref<ProcessGroup> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  std::string_view backend(Device device) const override { return inner_->backend(device); }
  bool supports(const Collective& c) const override { return inner_->supports(c); }
  Ref<Work> submit(const Collective& c) override { return inner_->submit(c); }
  Ref<ProcessGroup> split(int color, int key, CallSite site) override {
    Ref<ProcessGroup> part = inner_->split(color, key, site);
    return part ? decorate(std::move(part)) : part;
  }
  void abort(const std::string& why) override { inner_->abort(why); }
  void flush() override { inner_->flush(); }
  Ref<Storage> allocate(size_t bytes, Device device) override {
    return inner_->allocate(bytes, device);
  }
  bool has_own_memory(Device device) const override { return inner_->has_own_memory(device); }
  int global_rank(int r) const override { return inner_->global_rank(r); }
  Millis timeout() const override { return inner_->timeout(); }
  void working(std::string_view what) override { inner_->working(what); }

 protected:
  /// Puts the same decoration around `group`; it shares its state with this one.
  virtual Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) = 0;
  const Ref<ProcessGroup> inner_;
};

}  // namespace tessera
