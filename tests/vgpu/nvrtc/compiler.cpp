#include "tests/vgpu/nvrtc/compiler.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/vgpu/nvrtc/text.h"

extern char** environ;

namespace vgpu {

namespace {

namespace fs = std::filesystem;

// Where device/ and module.o are: beside this library.
const fs::path& home() {
  static const fs::path folder = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&compile), &info);
    return fs::canonical(info.dli_fname).parent_path();
  }();
  return folder;
}

std::string environment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

bool run(const std::vector<std::string>& command, const fs::path& log) {
  std::vector<char*> argv;
  for (const std::string& a : command) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  pid_t pid;
  int status = 1;
  if (posix_spawnp(&pid, argv[0], &files, nullptr, argv.data(), environ) == 0)
    waitpid(pid, &status, 0);
  else
    write(log, "vgpu: " + command[0] + " cannot be started; VGPU_CXX names another g++\n");
  posix_spawn_file_actions_destroy(&files);
  return status == 0;
}

// Two of FNV-1a's 64 bits, from different beginnings.
class Hash {
 public:
  void add(const std::string& text) {
    for (const char c : text + '\0') {
      a_ = (a_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
      b_ = (b_ ^ static_cast<unsigned char>(c) ^ (b_ >> 29)) * 0x9e3779b97f4a7c15ull;
    }
  }
  std::string text() const {
    char hex[33];
    std::snprintf(hex, sizeof(hex), "%016llx%016llx", static_cast<unsigned long long>(a_),
                  static_cast<unsigned long long>(b_));
    return hex;
  }

 private:
  uint64_t a_ = 0xcbf29ce484222325ull, b_ = 0x84222325cbf29ce4ull;
};

// The emulation itself.
const std::string& emulation() {
  static const std::string all = [] {
    std::string text;
    for (const char* file : {"device/abi.h", "device/emulate.h", "device/numbers.h", "module.o"})
      text += read(home() / file);
    return text;
  }();
  return all;
}

struct Folder {
  fs::path path;
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "vgpu-XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

Compilation build(const std::string& source, const std::string& name,
                  const std::vector<std::string>& flags, const std::vector<std::string>& own,
                  const std::string& definitions, bool checked, const std::string& compiler) {
  const Folder folder;
  const fs::path text = folder.path / "k.cpp", plain = folder.path / "k.ii",
                 object = folder.path / "k.o", module = folder.path / "k.so",
                 log = folder.path / "log";
  // Everything has internal linkage: variables of templates may lie in a section then.
  write(text, "#include \"device/emulate.h\"\n" + definitions + "namespace {\n#line 1 \"" + name +
                  "\"\n" + source + "\n}\n");
  std::vector<std::string> command{
      compiler, "-E", "-std=c++20", "-nostdinc", "-w", "-D__CUDACC_RTC__", "-I" + home().string()};
  command.insert(command.end(), own.begin(), own.end());
  command.insert(command.end(), {text.string(), "-o", plain.string()});
  Compilation result;
  if (run(command, log)) {
    const PlainText made = plain_text(read(plain));
    std::string all = made.text;
    for (const KernelText& k : made.kernels)
      all +=
          "extern \"C\" __attribute__((visibility(\"default\"), used)) const VgpuKernel "
          "vgpu_kernel_" +
          k.name + " = {vgpu::Entry<&" + k.name + ">::threads, sizeof(vgpu::Entry<&" + k.name +
          ">::sizes) / sizeof(unsigned) - 1, vgpu::Entry<&" + k.name + ">::sizes, " + k.bound +
          "};\n";
    all += "extern \"C\" const int vgpu_checked = " + std::to_string(checked) +
           "; extern \"C\" const int vgpu_kernels = " + std::to_string(made.kernels.size()) + ";\n";
    write(plain, all);
    command = {compiler, "-x", "c++-cpp-output"};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"-c", plain.string(), "-o", object.string()});
    result.good = run(command, log) && run({compiler, "-shared", "-o", module.string(),
                                            object.string(), (home() / "module.o").string(), "-lm"},
                                           log);
  }
  result.log = read(log);
  if (result.good) result.cubin = read(module);
  return result;
}

std::string compiler_name() { return environment("VGPU_CXX", "g++"); }

std::vector<std::string> flags_of(bool checked) {
  std::vector<std::string> flags{"-std=c++20", "-O2", "-fPIC", "-march=native", "-ffp-contract=off",
                                 "-fno-math-errno", "-fno-trapping-math", "-w",
                                 // Modules have kernels of one name, and are told apart by address.
                                 "-fvisibility=hidden", "-fno-gnu-unique"};
  if (checked)
    flags.insert(flags.end(), {"-fsanitize=thread,alignment,bounds",
                               "--param=tsan-instrument-func-entry-exit=0"});
  return flags;
}

}  // namespace

std::string identity(bool checked) {
  Hash hash;
  hash.add(emulation()), hash.add(compiler_name());
  for (const std::string& f : flags_of(checked)) hash.add(f);
  return hash.text() + (checked ? "-checked" : "");
}

Compilation compile(const std::string& source, const std::string& name,
                    const std::string& architecture, const std::vector<std::string>& definitions,
                    bool checked) {
  const std::vector<std::string> flags = flags_of(checked);
  std::vector<std::string> own{"-D__CUDA_ARCH__=" + architecture};
  if (checked) own.emplace_back("-DVGPU_CHECKED");
  std::string defined;  // behind emulate.h, which has names of its own
  for (const std::string& d : definitions) {
    const size_t equals = d.find('=');
    defined += "#define " + d.substr(0, equals) + " " +
               (equals == d.npos ? "1" : d.substr(equals + 1)) + "\n";
  }
  const std::string compiler = compiler_name();
  Hash hash;
  for (const std::string& part : {emulation(), compiler, name, source, defined}) hash.add(part);
  for (const std::string& f : flags) hash.add(f);
  for (const std::string& d : own) hash.add(d);
  const fs::path cache = environment("VGPU_CACHE", (home() / "cache").string());
  const fs::path entry = cache / (hash.text() + (checked ? "-checked.so" : ".so"));
  if (std::string found = read(entry); !found.empty()) return {true, "", std::move(found)};
  Compilation result = build(source, name, flags, own, defined, checked, compiler);
  std::error_code failed;
  fs::create_directories(cache, failed);
  if (result.good && !failed) {
    // Whole or not at all: processes share the folder.
    const fs::path fresh = entry.string() + "." + std::to_string(getpid()) + "." +
                           std::to_string(reinterpret_cast<uintptr_t>(&result) & 0xffffff);
    write(fresh, result.cubin);
    fs::rename(fresh, entry, failed);
  }
  return result;
}

}  // namespace vgpu
