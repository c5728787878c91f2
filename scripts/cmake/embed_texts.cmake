# Writes OUTPUT, a C++ file that defines the array NAME of TYPE, and its length COUNT, which HEADER declares in NAMESPACE: path
# from ROOT and text of each of FILES (separated by |), what a file includes in its place. Run by tessera_embed_texts at build
# time.
string(REPLACE "|" ";" FILES "${FILES}")
set(entries "")
foreach(file IN LISTS FILES)
  file(READ ${ROOT}/${file} text)
  while(INCLUDES AND text MATCHES "\n#include \"([^\"\n]+)\"")
    set(line "${CMAKE_MATCH_0}")
    file(READ ${ROOT}/${CMAKE_MATCH_1} included)
    string(REPLACE "${line}" "\n${included}" text "${text}")
  endwhile()
  string(APPEND entries "    {\"${file}\", R\"embedded(${text})embedded\"},\n")
endforeach()
file(WRITE ${OUTPUT}
  "#include \"${HEADER}\"\n\nnamespace ${NAMESPACE} {\n\n"
  "const ${TYPE} ${NAME}[] = {\n${entries}};\nconst size_t ${COUNT} = sizeof(${NAME}) / sizeof(${TYPE});\n\n"
  "}  // namespace ${NAMESPACE}\n")
