// What `--version` prints.
#include "core/base/version.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace tessera {
namespace {

TEST(Version, TheBuildIdIsThatOfTheFile) {
  const std::string id = build_id();
  ASSERT_FALSE(id.empty());
  std::string bytes;
  for (size_t i = 0; i < id.size(); i += 2) bytes += char(std::stoi(id.substr(i, 2), nullptr, 16));
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string program(std::istreambuf_iterator<char>(file), {});
  EXPECT_NE(program.find("GNU" + std::string(1, '\0') + bytes), program.npos);
  EXPECT_NE(version_text("this").find("\nbuild: " + id + "\n"), std::string::npos);
}

}  // namespace
}  // namespace tessera
