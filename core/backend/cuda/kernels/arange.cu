// begin, begin + step, ...: numbers of the index. Constants are copies of a number by value
// (pointwise.cu). After convert.h and device.h. Invariant: integers are exact beyond 2^53.
namespace tessera::device {

template <class T>
TESSERA_FN void arange(const ArangeCall& c) {
  const unsigned i = blockIdx.x * 256 + threadIdx.x;
  if (i >= c.count) return;
  static_cast<T*>(c.out)[i] = c.real ? Narrow<T>::from(c.begin + c.step * double(i))
                                     : Narrow<T>::from(c.first + c.each * long(i));
}

}  // namespace tessera::device

// instances: T
KERNEL(arange, ArangeCall, 256) { arange<T>(c); }
