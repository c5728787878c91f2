#include "core/primitive/attributes.h"

namespace tessera {

bool AttributeReader::flag(std::string_view name) {
  int64_t v = integer(name);
  TESSERA_CHECK(v == 0 || v == 1, "attribute {}: {} is neither 0 nor 1", name, v);
  return v != 0;
}
int AttributeReader::dim(std::string_view name) {
  int64_t v = integer(name);
  TESSERA_CHECK(v >= 0 && v < kMaxDims, "attribute {}: {} is no dim; they are 0 to {}", name, v,
                kMaxDims - 1);
  return int(v);
}
uint32_t AttributeReader::dim_mask(std::string_view name) {
  int64_t v = count(name);
  TESSERA_CHECK(v < int64_t(1) << kMaxDims, "attribute {}: {} names dims beyond {}", name, v,
                kMaxDims - 1);
  return uint32_t(v);
}
int64_t AttributeReader::count(std::string_view name) {
  int64_t v = integer(name);
  TESSERA_CHECK(v >= 0, "attribute {}: {} is negative", name, v);
  return v;
}
int AttributeReader::int32(std::string_view name) {
  int64_t v = integer(name);
  TESSERA_CHECK(v >= INT32_MIN && v <= INT32_MAX, "attribute {}: {} leaves 32 bits", name, v);
  return int(v);
}
int AttributeReader::count32(std::string_view name) { return count(name), int32(name); }
Dims AttributeReader::signed_numbers(std::string_view name) {
  std::vector<int64_t> v = dims(name);
  TESSERA_CHECK(v.size() <= size_t(kMaxDims), "attribute {}: {} numbers, at most {} fit", name,
                v.size(), kMaxDims);
  return Dims(v);
}
Dims AttributeReader::numbers(std::string_view name) {
  Dims v = signed_numbers(name);
  for (int64_t x : v)
    TESSERA_CHECK(x >= 0, "attribute {}: {} has a negative number", name, to_string(v));
  return v;
}
DType AttributeReader::dtype(std::string_view name) {
  std::string v = text(name);
  for (DType t : kAllDTypes)
    if (name_of(t) == v) return t;
  throw UserError(fmt::format("attribute {}: there is no dtype \"{}\"", name, v));
}
Device AttributeReader::device(std::string_view name) { return parse_device(text(name)); }

}  // namespace tessera
