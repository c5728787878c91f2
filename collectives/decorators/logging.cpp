#include "collectives/decorators/logging.h"

#include "collectives/plan.h"
#include "core/base/log.h"

namespace tessera {

Ref<Work> LoggingGroup::submit(const Collective& c) {
  size_t bytes = 0;
  for (const Tensor& t : c.in.empty() ? c.out : c.in) bytes += t.nbytes();
  Ref<Work> work = inner_->submit(c);
  logging::debug("{}{} #{} on {}: {} bytes, at {}", name_of(c.kind), c.async ? "_async" : "",
                 work->seq(), name(), bytes, detail::describe(c.site));
  return work;
}

}  // namespace tessera
