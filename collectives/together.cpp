#include "collectives/together.h"

namespace tessera {

static constinit thread_local TogetherScope* outermost = nullptr;

TogetherScope::TogetherScope() {
  if (!outermost) outermost = this;
}

// Whoever needs a result hears of a failure.
TogetherScope::~TogetherScope() {
  if (outermost == this) outermost = nullptr;
  for (const Ref<Work>& work : works_) {
    try {
      work->hurry();
    } catch (const std::exception&) {
    }
  }
}

TogetherScope* TogetherScope::current() { return outermost; }

}  // namespace tessera
