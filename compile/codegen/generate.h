// Makes code from bodies: prints their text, runs the system's compiler, loads the shared object
// and returns function pointers. Equal bodies are compiled once.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "compile/codegen/fused.h"

namespace tessera::compiler {

/// True when print_cpp can print `body`. It can if each sum is over whole rows, or over all rows
/// and read by no value that varies with the row, and if integers are divided by constants only.
bool schedulable(const Body& body);
/// Returns the source of one kernel with C linkage under `name`, to be put after prologue_cpp(). It
/// is readable: loops, one line for each instruction, and a heading that says what it is made of.
std::string print_cpp(const Body& body, std::string_view name);
/// The text of a kernel for bodies that differ in the sizes of their loops: each number that
/// follows from the sizes is left out of the text and written beside it.
struct SizedText {
  struct Number {
    std::string digits;  // as print_cpp writes it: "768", "0.5f"
    enum Kind : uint8_t { kInteger, kFloat, kDouble } kind = kInteger;
    int64_t word = 0;       // its value, a floating one by the bits of a double
    bool capacity = false;  // the extent of an array: code for a larger one serves too
  };
  static constexpr char kNumber = '\1';  // in `text`: here a number follows
  static constexpr char kTable = '\2';   // in `text`: here names of numbers may be declared
  std::string text;
  std::vector<Number> numbers;  // in the order of the text
};
SizedText print_sized(const Body& body, std::string_view name);
/// What precedes the kernels of a file: the functors of core/ops, embedded when Tessera was built.
std::string prologue_cpp();
/// Writes `source` into `folder` as kernels-`name`; "" stands for TESSERA_COMPILE_DUMP, and nothing
/// is written where that is not set. Throws UserError where it cannot be written.
void dump_source(std::string folder, const std::string& name, const std::string& source);

struct Schedule;
struct GpuLayout;
/// Returns the same kernel as CUDA C++: `name`(operands.., results.., scratch, whole), pointers to
/// first elements, and for operands of `numbers` (bit k: operand k) the value in its register's
/// type. `whole`: packs of elements are aligned. Where the layout needs scratch, `name`_finish with
/// the same parameters is to be launched next. prologue_cuda() is what precedes it.
std::string print_cuda(const Schedule& schedule, const GpuLayout& layout, std::string_view name,
                       uint64_t numbers);
/// The same for `body`; "" where it has no schedule or no layout.
std::string print_cuda(const Body& body, std::string_view name);
std::string prologue_cuda();

/// Sets chunks, grain and scratch of `code` from its schedule.
void set_sizes(KernelCode& code, const Schedule& schedule);

struct GenerateOptions {
  std::string cache_dir = {};  // "": TESSERA_COMPILE_CACHE, else ~/.cache/tessera
  std::string dump_dir = {};   // "": TESSERA_COMPILE_DUMP, else nothing is dumped
  std::string compiler = {};   // "": TESSERA_COMPILE_CXX, else c++, g++, clang++ by PATH
};
struct GenerateReport {
  int kernels = 0;   // distinct bodies
  int compiled = 0;  // by this process, now
  bool from_cache = false;
  double seconds = 0;
};

/// Generates code for each of `kernels`. One file is compiled for all kernels that the cache lacks;
/// it is written to the cache (under another name, then fsynced and renamed, so that a killed
/// process leaves no entry; the other ranks of a node wait for the one that compiles) and loaded.
/// Result i belongs to kernels[i]. Throws UserError where no compiler is found or it fails (with
/// its message and the file), and where the cache cannot be written; the caller then runs without
/// generated code.
std::vector<Ref<const LoadedKernel>> generate(std::span<const Fused* const> kernels,
                                              const GenerateOptions& options,
                                              GenerateReport* report = nullptr);

}  // namespace tessera::compiler
