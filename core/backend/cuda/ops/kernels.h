// The kernels of this backend's texts by name, for the families of this folder. Invariant: a text
// is compiled once for each card, when one of its kernels is first launched there.
#pragma once
#include <string_view>

#include "core/backend/cuda/launch.h"
#include "core/base/error.h"

namespace tessera::cuda {

/// The kernel `entry` of the instance that is called `instance` (kernels/text.h). Throws BugError
/// where families.cpp lists none. Thread-safe.
UntypedKernel& find_kernel(std::string_view instance, std::string_view entry);

/// `n`, for a kernel that counts in 32 bits; throws UserError from 2^31 on, naming `what`.
inline unsigned countable(int64_t n, std::string_view what) {
  TESSERA_CHECK(n < int64_t(1) << 31, "cuda: {} of {} is more than kernels count in 31 bits", what,
                n);
  return unsigned(n);
}

/// Enqueues that kernel on `stream` with its one parameter.
template <class Call>
void launch(std::string_view instance, std::string_view entry, const Geometry& geometry,
            const Stream& stream, Call call) {
  void* parameters[] = {&call, nullptr};
  find_kernel(instance, entry).launch(geometry, stream, parameters);
}

}  // namespace tessera::cuda
