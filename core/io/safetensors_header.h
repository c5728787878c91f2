// The header of a safetensors file as data: it is parsed from untrusted text, checked as a whole,
// and printed. Invariant: what parse_header returns is complete and consistent with the file's
// size, and no memory has been allocated for tensors.
#pragma once
#include <string>
#include <vector>

#include "core/base/function_ref.h"
#include "core/io/safetensors.h"

namespace tessera::io {

struct Header {
  Metadata metadata;
  // In ascending order of names; offsets count from the start of the file.
  std::vector<TensorInfo> tensors;
};

/// `source` delivers the `header_bytes` of JSON. `where` begins every error. Throws UserError
/// unless the header is sound for a file of `file_bytes`.
Header parse_header(FunctionRef<size_t(char*, size_t)> source, uint64_t header_bytes,
                    uint64_t file_bytes, const std::string& where);

/// JSON text of the header, padded with spaces so that the data begin, after 8 bytes and the text,
/// at a multiple of `align` (itself one of 8). `tensors` in the order of their data; their offsets
/// are set to the positions the text implies. Throws UserError for names or metadata that are not
/// UTF-8.
std::string print_header(std::vector<TensorInfo>& tensors, const Metadata& metadata,
                         size_t align = 8);

}  // namespace tessera::io
