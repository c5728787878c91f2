#include "collectives/gloo/engine.h"
namespace tessera::detail {
std::unique_ptr<Engine> make_gloo_engine(const Membership&, const GlooOptions&) {
  throw UserError("gloo: not built");
}
}  // namespace tessera::detail
