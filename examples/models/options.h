// Options of a model by name, so that a command line can set any field (--set dim=256) and a file
// can store them all. A struct of options lists its fields once, in fields_of(Options&).
#pragma once
#include <charconv>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/base/error.h"

namespace tessera::models {

struct Field {
  std::string_view name;
  std::variant<int64_t*, double*, bool*> value;
};

/// The fields of a struct of options; `model` names it in errors.
struct Fields {
  std::string_view model;
  std::vector<Field> fields;
};

/// Sets the field `key` from `text`. Throws UserError that lists the fields, or names the value
/// that does not parse.
inline void set_field(const Fields& of, std::string_view key, std::string_view text) {
  const std::string_view model = of.model;
  std::string names;
  for (const Field& f : of.fields) {
    names += (names.empty() ? "" : ", ") + std::string(f.name);
    if (f.name != key) continue;
    bool parsed = std::visit(
        [&](auto* value) {
          if constexpr (std::is_same_v<decltype(value), bool*>) {
            *value = text == "true" || text == "1";
            return *value || text == "false" || text == "0";
          } else {
            auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
            return error == std::errc() && end == text.data() + text.size();
          }
        },
        f.value);
    TESSERA_CHECK(parsed, "{}: {}=\"{}\" does not parse; give {}", model, key, text,
                  f.value.index() == 2   ? "true or false"
                  : f.value.index() == 1 ? "a number"
                                         : "an integer");
    return;
  }
  throw UserError(fmt::format("{}: no option \"{}\"; it has {}", model, key, names));
}

}  // namespace tessera::models
