#include "core/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::logging {
namespace {

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::kDebug: return spdlog::level::debug;
    case Level::kInfo: return spdlog::level::info;
    case Level::kWarn: return spdlog::level::warn;
    case Level::kError: return spdlog::level::err;
  }
  return spdlog::level::off;
}

spdlog::logger& logger() {
  // Leaked on purpose: messages may be written while statics are destroyed.
  static spdlog::logger* logger = [] {
    auto* l = new spdlog::logger("tessera", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    std::string rank = env::get("RANK");
    l->set_pattern(rank.empty() ? "[%l] %v" : "[%l rank " + rank + "] %v");
    std::string level = env::get("TESSERA_LOG", "warn");
    auto parsed = spdlog::level::from_str(level);
    if (parsed == spdlog::level::off && level != "off") {
      parsed = spdlog::level::warn;
      l->warn(
          "TESSERA_LOG: unknown level \"{}\", expected debug, info, warn, error or off; using warn",
          level);
    }
    l->set_level(parsed);
    l->flush_on(spdlog::level::debug);
    return l;
  }();
  return *logger;
}

}  // namespace

bool enabled(Level level) { return logger().should_log(to_spdlog(level)); }
void write(Level level, const std::string& text) { logger().log(to_spdlog(level), "{}", text); }

}  // namespace tessera::logging
