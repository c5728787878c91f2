#include "core/primitive/registry.h"

namespace tessera {

void OpRegistry::add(std::string_view name, std::function<std::vector<Sample>()> samples) {
  intern_op(name);
  for (const OpEntry& e : entries_)
    TESSERA_ASSERT(e.name != name, "op {} is registered twice", name);
  entries_.push_back({std::string(name), std::move(samples)});
}

}  // namespace tessera
