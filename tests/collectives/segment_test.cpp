// The memory that the ranks of a shared-memory group have in common: where it cannot be allocated,
// or is too small.
#include "collectives/shm/segment.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace tessera::detail {
namespace {

// The system would send a signal.
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

// If it is smaller than a small call's pieces, or than a line for each rank, writes would exceed
// it.
TEST(Segment, StagingAreasThatAreTooSmallAreOneError) {
  auto error = [](int size, size_t stage_bytes) -> std::string {
    try {
      Segment::make_private(size, {.stage_bytes = stage_bytes, .mail_bytes = 64});
    } catch (const UserError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(error(2, Segment::kInlineBytes), "");
  EXPECT_NE(error(2, Segment::kInlineBytes - 1).find("65535 bytes are too small for 2 ranks"),
            std::string::npos);
  EXPECT_NE(error(1025, Segment::kInlineBytes).find("make stage_bytes at least 65600"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::detail
