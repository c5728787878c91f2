// The memory that the ranks of a shared-memory group have in common, where it cannot be had.
#include "collectives/shm/segment.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace tessera::detail {
namespace {

// The system would answer with a signal.
TEST(Segment, LimitedFilesAreOneError) {
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit little{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &little);
  std::string text;
  try {
    Segment::make_shared(2, {});
  } catch (const UserError& e) {
    text = e.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(text.find("files are limited to 4096 bytes (ulimit -f)"), text.npos) << text;
  EXPECT_NE(text.find("TESSERA_BACKEND=gloo"), text.npos) << text;
}

}  // namespace
}  // namespace tessera::detail
