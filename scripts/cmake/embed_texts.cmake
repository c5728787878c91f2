# Writes OUTPUT, a C++ file that defines `tessera::compiler::kEmbedded`: name and text of each of FILES (separated by |), under
# its path from ROOT, what a file includes in its place. Run by tessera_embed_texts at build time.
string(REPLACE "|" ";" FILES "${FILES}")
set(entries "")
foreach(file IN LISTS FILES)
  file(READ ${ROOT}/${file} text)
  while(text MATCHES "\n#include \"([^\"\n]+)\"")
    set(line "${CMAKE_MATCH_0}")
    file(READ ${ROOT}/${CMAKE_MATCH_1} included)
    string(REPLACE "${line}" "\n${included}" text "${text}")
  endwhile()
  string(APPEND entries "    {\"${file}\", R\"embedded(${text})embedded\"},\n")
endforeach()
file(WRITE ${OUTPUT}
  "#include \"compile/codegen/functors.h\"\n\nnamespace tessera::compiler {\n\n"
  "const Embedded kEmbedded[] = {\n${entries}};\nconst size_t kEmbeddedCount = sizeof(kEmbedded) / sizeof(Embedded);\n\n"
  "}  // namespace tessera::compiler\n")
