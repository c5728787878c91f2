// How many registers and how much local memory each kernel of a cubin uses.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::cuda::test {

struct Use {
  std::string kernel;
  unsigned registers = 0, frame_bytes = 0;
};

template <class T>
T at(const std::string& bytes, size_t offset) {
  T value{};
  if (offset + sizeof(T) > bytes.size()) throw std::runtime_error("a cubin ends early");
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

// What an ELF file of machine 190 (CUDA) says of its kernels in the section .nv.info: records of
// format, attribute and size; of 0x04 with attribute 0x2f (registers) and 0x11 (frame), both a
// symbol's number and a value. Sections of registers' counts name kernels in the symbol table.
inline std::vector<Use> uses_of(const std::string& cubin) {
  std::vector<Use> uses;
  if (cubin.compare(0, 4, "\177ELF") != 0 || at<uint16_t>(cubin, 18) != 190) return uses;
  const auto sections = at<uint64_t>(cubin, 40);
  const auto entry = at<uint16_t>(cubin, 58), count = at<uint16_t>(cubin, 60),
             names = at<uint16_t>(cubin, 62);
  auto header = [&](size_t i) { return sections + i * entry; };
  const auto text_of = [&](size_t table, size_t offset) {
    return std::string(cubin.c_str() + at<uint64_t>(cubin, header(table) + 24) + offset);
  };
  size_t symbols = 0, info = 0;
  for (size_t i = 0; i < count; ++i) {
    const std::string name = text_of(names, at<uint32_t>(cubin, header(i)));
    if (name == ".symtab") symbols = i;
    if (name == ".nv.info") info = i;
  }
  if (!symbols || !info) throw std::runtime_error("a cubin without .nv.info");
  const auto strings = at<uint32_t>(cubin, header(symbols) + 40);
  const auto symbol = [&](uint32_t n) {
    const size_t where = at<uint64_t>(cubin, header(symbols) + 24) + n * 24;
    return text_of(strings, at<uint32_t>(cubin, where));
  };
  std::map<std::string, Use> found;
  const size_t begin = at<uint64_t>(cubin, header(info) + 24),
               end = begin + at<uint64_t>(cubin, header(info) + 32);
  for (size_t i = begin; i + 4 <= end;) {
    const auto format = at<uint8_t>(cubin, i), attribute = at<uint8_t>(cubin, i + 1);
    const size_t size = format == 4 ? at<uint16_t>(cubin, i + 2) : 0;
    if (format == 4 && size == 8 && (attribute == 0x2f || attribute == 0x11)) {
      Use& use = found[symbol(at<uint32_t>(cubin, i + 4))];
      (attribute == 0x2f ? use.registers : use.frame_bytes) = at<uint32_t>(cubin, i + 8);
    }
    i += 4 + size;
  }
  for (auto& [name, use] : found) {
    use.kernel = name;
    uses.push_back(use);
  }
  return uses;
}

}  // namespace tessera::cuda::test
