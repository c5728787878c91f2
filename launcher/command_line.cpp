#include "launcher/command_line.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <set>

#include "collectives/store/environment.h"
#include "collectives/store/liveness.h"
#include "core/base/error.h"
#include "core/base/spelling.h"

namespace tessera {
namespace {

bool is_flag(const std::string& word) { return word.starts_with("-") && word != "-"; }

std::string meant_by(const std::string& word, const std::vector<std::string>& known) {
  const std::string meant = nearest_word(word, known);
  return meant.empty() ? "" : fmt::format(" (is {} meant?)", meant);
}

std::string meant_flag(const std::string& flag, const CLI::App& app) {
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  return meant_by(flag, known);
}

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!sub->get_group().empty()) names.push_back(sub->get_name());  // "": hidden
  return names;
}

// A script's variable without a value leaves an empty value, which this explains.
std::string why_no_value(const std::string& text) {
  if (text.empty()) return "is empty; give it a value, or leave the flag out";
  if (text.starts_with("--")) return fmt::format("\"{}\" is a flag, not its value", text);
  return "";
}

// CLI11 replaces a number that is out of range by the nearest one in range; this refuses it.
template <class Number>
std::string why_no_number(const std::string& text) {
  Number value{};
  const char *begin = text.data() + text.starts_with('+'), *end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(begin, end, value);
  if (error == std::errc::result_out_of_range) return fmt::format("{} is out of range", text);
  if (error != std::errc() || rest != end)
    return fmt::format("\"{}\" is no {}number", text, std::is_integral_v<Number> ? "whole " : "");
  if constexpr (std::is_floating_point_v<Number>)
    if (!std::isfinite(value)) return fmt::format("{} is not finite", text);
  return "";
}

void add_checks(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 0) continue;
    const std::string type = option->get_type_name();
    if (!type.starts_with("[")) option->check(CLI::Validator(why_no_value, ""));
    if (type.starts_with("INT")) option->check(CLI::Validator(why_no_number<int64_t>, ""));
    if (type.starts_with("UINT")) option->check(CLI::Validator(why_no_number<uint64_t>, ""));
    if (type.starts_with("FLOAT")) option->check(CLI::Validator(why_no_number<double>, ""));
  }
  for (CLI::App* sub : app.get_subcommands([](CLI::App*) { return true; })) add_checks(*sub);
}

// Splits the arguments into words, a flag and its value apart; `at` becomes the command that they
// are for.
std::vector<std::string> words_of(const CLI::App*& at, int argc, char** argv,
                                  std::vector<std::string>* command) {
  std::vector<std::string> words;
  std::set<const CLI::Option*> given;
  int i = 1;
  for (; i < argc; ++i) {
    std::string word = argv[i];
    if (command && (word == "--" || !is_flag(word))) break;
    if (!is_flag(word)) {
      auto named = at->get_subcommands([&](const CLI::App* s) { return s->get_name() == word; });
      const std::vector<std::string> commands = commands_of(*at);
      TESSERA_CHECK(!named.empty() || commands.empty(), "there is no command \"{}\"{}", word,
                    meant_by(word, commands));
      if (!named.empty()) at = named[0];
      words.push_back(word);
      continue;
    }
    const size_t equal = std::min(word.find('='), word.size());
    if (word.starts_with("--"))
      std::replace(word.begin() + 2, word.begin() + std::ptrdiff_t(std::max<size_t>(equal, 2)), '_',
                   '-');
    const std::string name = word.substr(0, equal);
    const CLI::Option* option = at->get_option_no_throw(name);
    TESSERA_CHECK(option, "there is no flag {}{}{}", name, meant_flag(name, *at),
                  command ? "; flags of PROGRAM go after its name" : "");
    if (option->get_items_expected_max() == 0) {
      words.push_back(word);
      continue;
    }
    TESSERA_CHECK(given.insert(option).second || option->get_items_expected_max() > 1 ||
                      option->get_multi_option_policy() != CLI::MultiOptionPolicy::Throw,
                  "{} is given twice; give it once", name);
    TESSERA_CHECK(equal < word.size() || i + 1 < argc, "{} expects a value", name);
    words.push_back(name);
    words.push_back(equal < word.size() ? word.substr(equal + 1) : argv[++i]);
  }
  if (command) {
    if (i < argc && std::string(argv[i]) == "--") ++i;
    command->assign(argv + i, argv + argc);
  }
  return words;
}

void parse(CLI::App& app, std::vector<std::string> words) {
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
  try {
    app.parse(words);
  } catch (const CLI::ExtrasError&) {
    throw UserError(
        fmt::format("\"{}\" is neither a flag nor the value of one", app.remaining(true).at(0)));
  } catch (const CLI::ConversionError& e) {  // "Could not convert: --flag = value"
    const std::string text = e.what();
    throw UserError(text.substr(std::min(text.find("--"), text.size())) +
                    " is no value that it takes");
  } catch (const CLI::RequiredError& e) {
    const bool chosen = !app.get_subcommands().empty() || commands_of(app).empty();
    throw UserError(chosen ? std::string(e.what()) : "no command is given");
  }
}

bool rank_0_has_failed() {
  constexpr auto kWait = std::chrono::seconds(1);
  try {
    const JobEnvironment job = job_environment();
    return job.rank > 0 && job.master_port > 0 &&
           connect_store(job, kWait)->get(kFailedKey, kWait) == "0";
  } catch (const Error&) {  // rank 0 has not, or cannot be asked
    return false;
  }
}

}  // namespace

void print_usage_error(const std::string& line) {
  if (!rank_0_has_failed()) std::fprintf(stderr, "%s\n", line.c_str());
}

std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv, int usage_status,
                                      std::vector<std::string>* command) {
  const CLI::App* at = &app;
  auto refuse = [&](const char* why) {
    std::string name = app.get_name();
    if (at != &app) name += " " + at->get_name();
    print_usage_error(fmt::format("{}: {}; see {} --help", name, why, name));
    return usage_status;
  };
  try {
    add_checks(app);
    parse(app, words_of(at, argc, argv, command));
    return std::nullopt;
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return refuse(e.what());
  } catch (const UserError& e) {
    return refuse(e.what());
  }
}

}  // namespace tessera
