// Logs every call at level debug: kind, number, bytes, call site.
#pragma once
#include "collectives/decorators/decorator.h"

namespace tessera {

class LoggingGroup final : public Decorator {
 public:
  using Decorator::Decorator;
  Ref<Work> submit(const Collective& c) override;

 protected:
  Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) override {
    return make_ref<LoggingGroup>(std::move(group));
  }
};

}  // namespace tessera
