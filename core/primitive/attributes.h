// The attributes of an op, said once: an aggregate lists its fields by name, and equality, hashing,
// printing, graph files and making the op again with other values all follow from that list.
//
//   struct SortAttributes {
//     int dim = 0;
//     int64_t count = 0;
//     bool descending = false;
//     static void fields(auto& a, auto& f) {
//       f.dim("dim", a.dim), f("count", a.count), f("descending", a.descending);
//     }
//   };
//
// Members that are not listed (which op of a family it is) belong to the op and are kept when it is
// made again. Invariant: a reader gives back what a visitor was shown. Values may come from a file,
// so a value that its field does not allow is refused, and the error names the field.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor/device.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace tessera {

/// Visits the attributes of a primitive.
class AttributeVisitor {
 public:
  virtual ~AttributeVisitor() = default;
  virtual void integer(std::string_view name, int64_t value) = 0;
  virtual void real(std::string_view name, double value) = 0;
  virtual void text(std::string_view name, std::string_view value) = 0;
  virtual void dims(std::string_view name, std::span<const int64_t> value) = 0;
};

/// The attributes that Primitive::attributes showed, by name; an op is made again from them. Values
/// are untrusted: each call throws UserError for a name that is not there and for a value of
/// another kind.
class AttributeReader {
 public:
  virtual ~AttributeReader() = default;
  virtual bool has(std::string_view name) const = 0;
  virtual bool is_integer(std::string_view name) const = 0;
  virtual int64_t integer(std::string_view name) = 0;
  virtual double real(std::string_view name) = 0;
  virtual std::string text(std::string_view name) = 0;
  virtual std::vector<int64_t> dims(std::string_view name) = 0;

  bool flag(std::string_view name);            // 0 or 1
  int dim(std::string_view name);              // 0 .. kMaxDims - 1
  uint32_t dim_mask(std::string_view name);    // a bit for each dim
  int64_t count(std::string_view name);        // not negative
  int int32(std::string_view name);            // fits in 32 bits
  int count32(std::string_view name);          // fits in 32 bits and is not negative
  Dims signed_numbers(std::string_view name);  // at most kMaxDims
  Dims numbers(std::string_view name);         // at most kMaxDims, none negative
  DType dtype(std::string_view name);
  Device device(std::string_view name);
};

/// The argument of `fields` that shows attributes to a visitor. FieldReader has a member of the
/// same name for each of its members.
class FieldWriter {
 public:
  explicit FieldWriter(AttributeVisitor& visitor) : v_(visitor) {}

  /// A field; its type decides how it is written. Integers are not negative.
  void operator()(std::string_view name, bool x) { v_.integer(name, x); }
  void operator()(std::string_view name, int x) { v_.integer(name, x); }
  void operator()(std::string_view name, int64_t x) { v_.integer(name, x); }
  void operator()(std::string_view name, double x) { v_.real(name, x); }
  void operator()(std::string_view name, const std::string& x) { v_.text(name, x); }
  void operator()(std::string_view name, DType x) { v_.text(name, name_of(x)); }
  void operator()(std::string_view name, Device x) { v_.text(name, to_string(x)); }
  void operator()(std::string_view name, const Dims& x) { v_.dims(name, x); }
  void operator()(std::string_view name, const std::vector<int64_t>& x) { v_.dims(name, x); }
  /// A field of integers that may be negative.
  void any(std::string_view name, const auto& x) { (*this)(name, x); }
  /// The number of a dim (int), or a set of dims, a bit for each (uint32_t).
  void dim(std::string_view name, int x) { v_.integer(name, x); }
  void dim(std::string_view name, uint32_t x) { v_.integer(name, x); }
  /// A field that is written only where it is not 0 or false: one that was added to an op later, so
  /// that older graph files stay valid and texts without it stay as they are.
  template <class T>
  void optional(std::string_view name, const T& x) {
    if (x != T()) (*this)(name, x);
  }
  /// The fields of the member `x`, an aggregate of its own, among those of the aggregate around it.
  template <class T>
  void within(const T& x) {
    T::fields(x, *this);
  }

  AttributeVisitor& visitor() const { return v_; }

 private:
  AttributeVisitor& v_;
};

/// The argument of `fields` that sets attributes from a reader.
class FieldReader {
 public:
  explicit FieldReader(AttributeReader& reader) : r_(reader) {}

  void operator()(std::string_view name, bool& x) { x = r_.flag(name); }
  void operator()(std::string_view name, int& x) { x = r_.count32(name); }
  void operator()(std::string_view name, int64_t& x) { x = r_.count(name); }
  void operator()(std::string_view name, double& x) { x = r_.real(name); }
  void operator()(std::string_view name, std::string& x) { x = r_.text(name); }
  void operator()(std::string_view name, DType& x) { x = r_.dtype(name); }
  void operator()(std::string_view name, Device& x) { x = r_.device(name); }
  void operator()(std::string_view name, Dims& x) { x = r_.numbers(name); }
  void operator()(std::string_view name, std::vector<int64_t>& x) { x = r_.dims(name); }
  void any(std::string_view name, int& x) { x = r_.int32(name); }
  void any(std::string_view name, int64_t& x) { x = r_.integer(name); }
  void any(std::string_view name, Dims& x) { x = r_.signed_numbers(name); }
  void dim(std::string_view name, int& x) { x = r_.dim(name); }
  void dim(std::string_view name, uint32_t& x) { x = r_.dim_mask(name); }
  template <class T>
  void optional(std::string_view name, T& x) {
    x = T();
    if (r_.has(name)) (*this)(name, x);
  }
  template <class T>
  void within(T& x) {
    T::fields(x, *this);
  }

  AttributeReader& reader() const { return r_; }

 private:
  AttributeReader& r_;
};

}  // namespace tessera
