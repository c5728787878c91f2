#include "examples/bench/commands.h"

#include <CLI/CLI.hpp>

namespace tessera::bench {

Subcommand::Subcommand(CLI::App& app, const std::string& name, const std::string& what)
    : app_(*app.add_subcommand(name, what)) {}

template <class T>
void Subcommand::option(const std::string& flag, T& value, const std::string& help) {
  CLI::Option* o = app_.add_option(flag, value, help);
  if constexpr (!std::is_same_v<T, std::vector<std::string>>) o->capture_default_str();
}
template void Subcommand::option(const std::string&, int&, const std::string&);
template void Subcommand::option(const std::string&, int64_t&, const std::string&);
template void Subcommand::option(const std::string&, double&, const std::string&);
template void Subcommand::option(const std::string&, std::string&, const std::string&);
template void Subcommand::option(const std::string&, std::vector<std::string>&, const std::string&);

template <class T>
void Subcommand::list(const std::string& flag, std::vector<T>& values, const std::string& help) {
  app_.add_option(flag, values, help)->delimiter(',')->capture_default_str();
}
template void Subcommand::list(const std::string&, std::vector<int>&, const std::string&);
template void Subcommand::list(const std::string&, std::vector<std::string>&, const std::string&);

void Subcommand::option(const std::string& flag, std::function<std::string(const std::string&)> set,
                        const std::string& usual, const std::string& help) {
  auto checked = [=](const std::string& given) {
    if (std::string wrong = set(given); !wrong.empty())
      throw CLI::ValidationError(flag + " " + given + ": " + wrong);
  };
  app_.add_option_function<std::string>(flag, checked, help)->default_str(usual);
}

void Subcommand::flag(const std::string& flag, bool& value, const std::string& help) {
  app_.add_flag(flag, value, help);
}
void Subcommand::clock_option() {
  app_.add_flag_callback(
      "--cpu-time", [] { set_clock(Clock::kThread); },
      "count this thread's CPU time, where other programs use the machine; default: wall time");
}
void Subcommand::hide() { app_.group(""); }
void Subcommand::runs(Run& run, std::function<Json()> f) {
  app_.callback([&run, f = std::move(f)] { run = f; });
}

}  // namespace tessera::bench
