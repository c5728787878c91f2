#include "core/nn/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <ostream>
#include <typeinfo>
#include <unordered_set>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/ops/pointwise.h"
#include "core/tensor/memory_label.h"

namespace tessera::nn {

struct Hooks {
  explicit Hooks(std::function<void(const char*)> changed) : changed(std::move(changed)) {}
  std::function<void(const char*)> changed;  // tells the module
  std::vector<std::pair<int, PreHook>> pre;
  std::vector<std::pair<int, PostHook>> post;
  std::vector<std::pair<int, UnwindHook>> unwind;
  int next = 0;
};

void HookHandle::remove() {
  if (auto hooks = hooks_.lock()) {
    std::erase_if(hooks->pre, [&](auto& h) { return h.first == number_; });
    std::erase_if(hooks->post, [&](auto& h) { return h.first == number_; });
    std::erase_if(hooks->unwind, [&](auto& h) { return h.first == number_; });
    hooks->changed("a hook");
  }
  hooks_.reset();
}

Module::~Module() {
  attached_.clear();  // what is attached may remove its hooks, and needs the other members for that
  for (auto& [name, child] : children_)
    if (child.use_count() > 0 && child->parent_ == this) child->parent_ = nullptr;
}

bool Module::training() const { return training_.read() != 0; }

void Module::changed(const char* what) {
  notify(events::LeavesOps{
      [&] { return fmt::format("{} of {} changed", what, path_.empty() ? type_name() : path_); }});
  parts_.note_change();
}

// ---- forward

Tensor Module::operator()(Tensor x) {
  if (!recompute_) [[likely]]
    return call_once(std::move(x));
  return tessera::recompute(
      *recompute_, [this](const Tensor& x) { return call_once(x); }, x);
}

// Its parameters are in no list, so nothing would train them. The outermost module is called in no
// forward; what stays as it is (a teacher, a loss) has no parameters that require grad.
void Module::check_registered() {
  if (!Scope::in_module() || substituted_ > 0 || !grad_enabled()) return;
  for (const Slot& s : slots())
    TESSERA_CHECK(
        s.is_buffer || !s.tensor->requires_grad(),
        "{}: called in the forward of {} and registered as a child of no module, so no optimizer "
        "trains its {}; say register_module(\"name\", member) in the constructor of the module "
        "that has it, or requires_grad_(false) if it is to stay as it is",
        type_name(), Scope::current().empty() ? "a module" : Scope::current(), s.name);
}

Tensor Module::call_once(Tensor x) {
  if (!registered_) [[unlikely]]
    check_registered();
  if (hooks_of_call()) [[unlikely]] {
    Tensor in[] = {std::move(x)};
    return call_once(in, [&] { return forward(in[0]); });
  }
  Scope scope = Scope::module(path_);
  return forward(std::move(x));
}

Tensor Module::forward(Tensor) {
  throw UserError(fmt::format(
      "{}: forward of one tensor is not what this module does; where it has other inputs call it "
      "with those, where it is yours override forward(Tensor)",
      type_name()));
}

void Module::recompute(RecomputeOptions options) {
  changed("recomputation");
  recompute_ = std::move(options);
}

Tensor Module::call(Inputs in, FunctionRef<Tensor()> body) {
  TESSERA_CHECK(
      !recompute_,
      "recompute: {} is called with more than one tensor, so it cannot be called again by "
      "itself; write recompute() around its call",
      type_name());
  return call_once(in, body);
}

Tensor Module::call_owning(std::vector<Tensor> in, std::function<Tensor(Inputs)> body) {
  auto once = [this, body = std::move(body)](const std::vector<Tensor>& given) {
    std::vector<Tensor> t = given;  // pre-hooks may change them
    return call_once(t, [&] { return body(t); });
  };
  if (!recompute_) return once(in);
  return tessera::recompute(*recompute_, std::move(once), in);
}

Tensor Module::call_once(Inputs in, FunctionRef<Tensor()> body) {
  if (!registered_) [[unlikely]]
    check_registered();
  Scope scope = Scope::module(path_);
  if (!hooks_of_call()) return body();
  // Copies, since a hook may remove itself.
  std::shared_ptr<Hooks> hooks = hooks_;
  try {
    auto pre = hooks->pre;
    for (auto& [number, hook] : pre) hook(*this, in);
    Tensor out = body();
    auto post = hooks->post;
    for (auto& [number, hook] : post) hook(*this, in, out);
    return out;
  } catch (...) {
    auto unwind = hooks->unwind;
    for (auto& [number, hook] : unwind) hook(*this);
    throw;
  }
}

// A call depends on the hooks that it runs, and on what is in the slots and children when it does.
const std::shared_ptr<Hooks>& Module::hooks_of_call() const {
  parts_.note_use();
  return hooks_;
}

Hooks& Module::hooks_to_change() {
  if (!hooks_) hooks_ = std::make_shared<Hooks>([this](const char* what) { changed(what); });
  changed("a hook");
  return *hooks_;
}

HookHandle Module::add_pre_hook(PreHook hook, bool outermost) {
  auto& pre = hooks_to_change().pre;
  pre.emplace(outermost ? pre.begin() : pre.end(), hooks_->next, std::move(hook));
  return HookHandle(hooks_, hooks_->next++);
}

HookHandle Module::add_unwind_hook(UnwindHook hook) {
  auto& unwind = hooks_to_change().unwind;
  unwind.emplace_back(hooks_->next, std::move(hook));
  return HookHandle(hooks_, hooks_->next++);
}

HookHandle Module::add_post_hook(PostHook hook) {
  auto& post = hooks_to_change().post;
  post.emplace_back(hooks_->next, std::move(hook));
  return HookHandle(hooks_, hooks_->next++);
}

// ---- building

void Module::check_name(const std::string& name, const char* who) const {
  TESSERA_CHECK(!name.empty() && name.find('.') == std::string::npos,
                "{}: name \"{}\" of a {} must not be empty or hold a dot", who, name, type_name());
  bool taken = std::ranges::any_of(entries_, [&](auto& e) { return e.name == name; }) ||
               std::ranges::any_of(children_, [&](auto& c) { return c.first == name; });
  TESSERA_CHECK(!taken, "{}: a {} has \"{}\" already", who, type_name(), name);
}

void Module::register_parameter(std::string name, Tensor& slot, Tensor value) {
  check_name(name, "register_parameter");
  if (value.defined() && is_differentiable(value.dtype())) {
    value.requires_grad_();
    TESSERA_CHECK(!grad_meta(value)->producer,
                  "register_parameter: \"{}\" of a {} is the result of an op, so no optimizer can "
                  "train it; register value.detach()",
                  name, type_name());
  }
  slot = std::move(value);
  entries_.push_back({std::move(name), &slot, false, true});
}

void Module::register_buffer(std::string name, Tensor& slot, Tensor value, bool persistent) {
  check_name(name, "register_buffer");
  slot = std::move(value);
  entries_.push_back({std::move(name), &slot, true, persistent});
}

void Module::adopt(std::string name, std::shared_ptr<Module> module) {
  check_name(name, "register_module");
  TESSERA_CHECK(module && module.get() != this, "register_module: \"{}\" of a {} is {}", name,
                type_name(), module ? "the module itself" : "null");
  module->registered_ = true;
  if (!module->parent_) {
    module->parent_ = this;
    module->set_path(path_.empty() ? name : path_ + "." + name);
  }
  children_.emplace_back(std::move(name), std::move(module));
  changed("a child");
}

void Module::set_path(const std::string& path) {
  path_ = path;
  for (auto& [name, child] : children_)
    if (child->parent_ == this) child->set_path(path + "." + name);
}

void Module::draw() {
  if (building().draw) reset(InitKeys::next());
}

void Module::reset(const InitKeys& keys) {
  for (const Entry& e : entries_)
    TESSERA_CHECK(e.is_buffer || !e.slot->defined(),
                  "{}: nothing draws its parameter \"{}\"; override reset(keys): fill it, as in "
                  "nn::normal_({}, 0, 0.02, keys.key(\"{}\")), and call reset_children(keys)",
                  type_name(), e.name, e.name, e.name);
  reset_children(keys);
}

void Module::reset_children(const InitKeys& keys) {
  for (auto& [name, child] : children_) child->reset(keys.child(name));
}

Tensor empty_parameter(const Shape& shape) {
  return empty(shape, context().default_dtype, parameter_device()).requires_grad_();
}

// ---- walking

void Module::collect_slots(const std::string& prefix, std::vector<Slot>& out) {
  for (Entry& e : entries_)
    if (e.slot->defined())
      out.push_back({prefix + e.name, this, e.slot, e.is_buffer, e.persistent});
  for (auto& [name, child] : children_) child->collect_slots(prefix + name + ".", out);
}

std::vector<std::pair<std::string, Module*>> numbered_modules(Module& model) {
  std::vector<std::pair<std::string, Module*>> blocks;
  for (auto& [path, module] : model.named_modules()) {
    const std::string last = path.substr(path.rfind('.') + 1);
    const bool number = !last.empty() && last.find_first_not_of("0123456789") == std::string::npos;
    const bool inside = std::ranges::any_of(
        blocks, [&, &p = path](auto& outer) { return p.starts_with(outer.first + "."); });
    if (number && !inside) blocks.emplace_back(path, module);
  }
  return blocks;
}

std::vector<Slot> Module::slots() {
  std::vector<Slot> out;
  collect_slots("", out);
  return out;
}

std::vector<NamedTensor> Module::distinct(bool parameters, bool buffers, bool persistent_only) {
  std::vector<NamedTensor> out;
  std::unordered_set<const TensorImpl*> seen;
  for (Slot& s : slots()) {
    if (s.is_buffer ? !buffers || (persistent_only && !s.persistent) : !parameters) continue;
    if (seen.insert(s.tensor->impl()).second) out.push_back({std::move(s.name), *s.tensor});
  }
  return out;
}

std::vector<NamedTensor> Module::named_parameters() { return distinct(true, false, false); }
std::vector<NamedTensor> Module::trainable_parameters() {
  std::vector<NamedTensor> all = named_parameters();
  std::erase_if(all, [](const NamedTensor& p) { return !p.tensor.requires_grad(); });
  return all;
}
std::vector<NamedTensor> Module::named_buffers() { return distinct(false, true, false); }
std::vector<NamedTensor> Module::state() { return distinct(true, true, true); }

std::vector<Tensor> Module::parameters() {
  std::vector<Tensor> out;
  for (NamedTensor& p : named_parameters()) out.push_back(std::move(p.tensor));
  return out;
}

int64_t Module::num_parameters() {
  int64_t n = 0;
  for (const Tensor& p : parameters()) n += p.numel();
  return n;
}

void Module::collect_modules(const std::string& prefix,
                             std::vector<std::pair<std::string, Module*>>& out) {
  if (std::ranges::any_of(out, [&](auto& m) { return m.second == this; })) return;
  out.emplace_back(prefix, this);
  for (auto& [name, child] : children_)
    child->collect_modules(prefix.empty() ? name : prefix + "." + name, out);
}

std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  std::vector<std::pair<std::string, Module*>> out;
  collect_modules("", out);
  return out;
}

std::string Module::no_such(std::string_view path) {
  std::string have;
  for (const Entry& e : entries_) have += (have.empty() ? "" : ", ") + e.name;
  for (auto& [name, child] : children_) have += (have.empty() ? "" : ", ") + name;
  return fmt::format("module: {} \"{}\" has no \"{}\"; it has {}", type_name(), path_, path,
                     have.empty() ? "nothing" : have);
}

Module& Module::submodule(std::string_view path) {
  if (path.empty()) return *this;
  size_t dot = path.find('.');
  std::string_view head = path.substr(0, dot);
  for (auto& [name, child] : children_)
    if (name == head)
      return child->submodule(dot == path.npos ? std::string_view() : path.substr(dot + 1));
  throw UserError(no_such(head));
}

Tensor& Module::slot(std::string_view path) {
  size_t dot = path.rfind('.');
  Module& owner = dot == path.npos ? *this : submodule(path.substr(0, dot));
  std::string_view last = dot == path.npos ? path : path.substr(dot + 1);
  for (Entry& e : owner.entries_)
    if (e.name == last) return *e.slot;
  throw UserError(owner.no_such(last));
}

void Module::replace(const Tensor& old, const Tensor& now) {
  Tensor target = old;  // `old` may be one of the slots
  bool any = false;
  for (Slot& s : slots())
    if (s.tensor->is_same(target)) *s.tensor = now, any = true, s.owner->changed("a slot");
  if (GradMeta* gone = grad_meta(target)) gone->replaced = true;
  if (GradMeta* back = grad_meta(now)) back->replaced = false;
  TESSERA_CHECK(any, "replace: no slot of {} holds this {}", type_name(),
                tessera::describe(target));
}

void Module::apply(FunctionRef<void(Module&)> f) {
  for (auto& [name, module] : named_modules()) f(*module);
}

Module& Module::train(bool on) {
  apply([on](Module& m) { m.training_.write(on); });
  return *this;
}

namespace {

void check_movable(const NamedTensor& t) {
  const GradMeta* meta = grad_meta(t.tensor);
  TESSERA_CHECK(!meta || !meta->sink,
                "to: the gradient of {} is reduced by a wrapper of the model; call to() before ddp "
                "and fully_shard",
                t.name);
}

}  // namespace

Module& Module::to(DType dtype) {
  TESSERA_CHECK(is_differentiable(dtype), "to: a module takes floats of 16 bits and more, not {}",
                name_of(dtype));
  for (NamedTensor& t : distinct(true, true, false)) {
    if (!is_differentiable(t.tensor.dtype()) || t.tensor.dtype() == dtype) continue;
    check_movable(t);
    NoGrad off;
    Tensor cast_to = t.tensor.to(dtype).detach();
    cast_to.requires_grad_(t.tensor.requires_grad());
    replace(t.tensor, cast_to);
  }
  return *this;
}

Module& Module::to(Device device) {
  NoGrad off;
  std::vector<std::pair<Tensor, Tensor>> moves;  // all are made before the first takes its place
  for (NamedTensor& t : distinct(true, true, false)) {
    if (t.tensor.device() == device) continue;
    check_movable(t);
    MemoryLabel label(MemoryUse::kParameters, module_of(t.name));
    moves.emplace_back(t.tensor, t.tensor.to(device).detach());
  }
  for (auto& [old, now] : moves) {
    now.requires_grad_(old.requires_grad());
    replace(old, now);
  }
  return *this;
}

Module& Module::requires_grad_(bool on) {
  for (Tensor& p : parameters()) p.requires_grad_(on);
  return *this;
}

void Module::zero_grad() {
  for (Tensor& p : parameters())
    if (p.requires_grad()) p.set_grad({});
}

// ---- printing

std::string Module::type_name() const {
  const char* mangled = typeid(*this).name();
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? text.get() : mangled;
  name = name.substr(0, name.find('<'));
  size_t colon = name.rfind(':');
  return colon == std::string::npos ? name : name.substr(colon + 1);
}

void Module::print(std::string& out, const std::string& name, int depth) const {
  out.append(size_t(depth) * 2, ' ');
  if (!name.empty()) out += "(" + name + "): ";
  out += type_name() + "(" + describe();
  if (!children_.empty()) {
    out += "\n";
    for (auto& [child_name, child] : children_) child->print(out, child_name, depth + 1);
    out.append(size_t(depth) * 2, ' ');
  }
  out += ")\n";
}

std::string Module::to_string() const {
  std::string out;
  print(out, "", 0);
  return out;
}

std::ostream& operator<<(std::ostream& out, const Module& module) {
  return out << module.to_string();
}

}  // namespace tessera::nn
