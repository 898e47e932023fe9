// Definitions that all kernels share: storage types, strided views, vectors, compile-time loops.
#pragma once

#include "ptx.cuh"

namespace tconv3d {

// States an assumption of a kernel that no memory access would reveal. The emulator checks it, and so do
// kernels compiled with the environment variable TCONV3D_CHECKED (compiler.py); elsewhere it generates no
// code.
#ifdef TCONV3D_EMULATOR
#define TCONV3D_ASSUME(condition) \
  if (!(condition)) emulator::trap({#condition " does not hold", __FILE__, __LINE__})
#else
#ifdef TCONV3D_CHECKED
#define TCONV3D_ASSUME(condition) \
  if (!(condition)) printf("%s does not hold at %s:%d\n", #condition, __FILE__, __LINE__), __trap()
#else
#define TCONV3D_ASSUME(condition) static_cast<void>(0)
#endif
#endif

// Storage types of 16 bits. Arithmetic is never done in them.
struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

template <class Acc>
__device__ __forceinline__ Acc widen(double value) {
  return static_cast<Acc>(value);
}
template <class Acc>
__device__ __forceinline__ Acc widen(float value) {
  return static_cast<Acc>(value);
}
template <class Acc>
__device__ __forceinline__ Acc widen(Half value) {
  return ptx::half_to_float(value.bits);
}
template <class Acc>
__device__ __forceinline__ Acc widen(BFloat16 value) {
  return ptx::bits_to_float(static_cast<unsigned>(value.bits) << 16);
}

template <class Scalar>
struct Narrow {
  template <class Acc>
  static __device__ __forceinline__ Scalar from(Acc value) {
    return static_cast<Scalar>(value);
  }
};
template <>
struct Narrow<Half> {
  static __device__ __forceinline__ Half from(float value) { return Half{ptx::float_to_half(value)}; }
  static __device__ __forceinline__ unsigned two(float first, float second) {
    return ptx::floats_to_halves(first, second);
  }
};
template <>
struct Narrow<BFloat16> {
  static __device__ __forceinline__ BFloat16 from(float value) {
    return BFloat16{ptx::float_to_bfloat16(value)};
  }
  static __device__ __forceinline__ unsigned two(float first, float second) {
    return ptx::floats_to_bfloat16s(first, second);
  }
};

// N neighbours in memory, moved by as few and as wide accesses as N and the type allow (at most 16 bytes
// each).
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  static_assert((N & (N - 1)) == 0, "a vector has a power of two elements");
  T at[N];
};
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* address) {
  return *reinterpret_cast<const Vector<T, N>*>(address);
}

// Stores a vector to global memory by one access. The compiler by itself stores many vectors element by
// element, and each of these stores writes partial sectors.
template <class T, int N>
__device__ __forceinline__ void store_vector(T* address, const Vector<T, N>& vector) {
  if constexpr (sizeof(vector) == 16) {
    ptx::store_global(address, *reinterpret_cast<const uint4*>(&vector));
  } else if constexpr (sizeof(vector) == 8) {
    ptx::store_global(address, *reinterpret_cast<const uint2*>(&vector));
  } else if constexpr (sizeof(vector) == 4) {
    ptx::store_global(address, *reinterpret_cast<const unsigned*>(&vector));
  } else {
    ptx::store_global(address, *reinterpret_cast<const unsigned short*>(&vector));
  }
}

// Stores two neighbours, or only the first. kAligned: always two, at an address that is a multiple of their
// size.
template <bool kAligned, class Scalar>
__device__ __forceinline__ void store_pair(Scalar* to, const Vector<Scalar, 2>& both, bool second) {
  if (kAligned || (second && reinterpret_cast<unsigned long long>(to) % sizeof(both) == 0)) {
    *reinterpret_cast<Vector<Scalar, 2>*>(to) = both;
  } else {
    to[0] = both.at[0];
    if (second) to[1] = both.at[1];
  }
}

// The strides of a 5-D tensor in elements. They are always 64-bit here: kernels narrow them when the planner
// has proved that every offset fits 32 bits.
struct Strides {
  long long n, c, d, h, w;
};

struct Extent {
  int d, h, w;
};

// Divides n < 2^31 by a divisor that is constant for a launch, by a multiplication and a shift (the planner
// computes the factors).
struct Divider {
  unsigned divisor, multiplier, shift;
};
__device__ __forceinline__ int divide(int n, const Divider& by) {
  const unsigned value = static_cast<unsigned>(n);
  const unsigned high = static_cast<unsigned>((static_cast<unsigned long long>(value) * by.multiplier) >> 32);
  return static_cast<int>((high + value) >> by.shift);
}
__device__ __forceinline__ long long divide(long long n, const Divider& by) { return n / by.divisor; }

// The type of offsets: 32 or 64 bits.
template <bool kWide>
struct IndexType {
  using type = int;
};
template <>
struct IndexType<true> {
  using type = long long;
};

template <bool kFirst, class First, class Second>
struct Choose {
  using type = First;
};
template <class First, class Second>
struct Choose<false, First, Second> {
  using type = Second;
};

// A loop whose index is a compile-time constant in its body: static_for<3>([&](auto i) { array[i]; ... }).
template <int kValue>
struct Int {
  static constexpr int value = kValue;
  __device__ constexpr operator int() const { return kValue; }
};
// The indices are halved, because compilers end a recursion of 200 templates.
template <int kEnd, int kBegin = 0, class Body>
__device__ __forceinline__ void static_for(Body&& body) {
  if constexpr (kEnd - kBegin == 1) {
    body(Int<kBegin>{});
  } else if constexpr (kEnd > kBegin) {
    static_for<(kBegin + kEnd) / 2, kBegin>(body);
    static_for<kEnd, (kBegin + kEnd) / 2>(body);
  }
}

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef TCONV3D_EMULATOR
  return reinterpret_cast<T*>(emulator::dynamic_shared());
#else
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  return reinterpret_cast<T*>(shared_bytes);
#endif
}

}  // namespace tconv3d
