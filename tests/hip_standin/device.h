// Lets g++ compile and run rendered HIP kernels: the types and functions of `aule.render._hip_prelude`, for the host.
//
// The threads of a workgroup are the fibers of shim_fibers.h. A kernel says how many lanes a wave has (AULE_WAVE).
#pragma once

#include <cmath>

#define SHIM_ANY_SIMD
#include "shim_fibers.h"

#define AULE_KERNEL(threads) extern "C"
// The fibers of a workgroup share one thread, and workgroups run one after another.
#define AULE_SHARED(bytes) static __attribute__((aligned(bytes)))
#define AULE_DEVICE static inline
#define AULE_HERE(registers)

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef _Float16 f16;
typedef float f32;
typedef double f64;

#define STANDIN_VECTOR(T, N) \
    typedef T T##x##N __attribute__((vector_size(sizeof(T) * N), aligned(sizeof(T) * N > 16 ? 16 : sizeof(T) * N)));
#define STANDIN_VECTORS(T) STANDIN_VECTOR(T, 2) STANDIN_VECTOR(T, 4) STANDIN_VECTOR(T, 8) STANDIN_VECTOR(T, 16)
STANDIN_VECTORS(i8) STANDIN_VECTORS(i16) STANDIN_VECTORS(i32) STANDIN_VECTORS(i64)
STANDIN_VECTORS(u8) STANDIN_VECTORS(u16) STANDIN_VECTORS(u32) STANDIN_VECTORS(u64)
STANDIN_VECTORS(f16) STANDIN_VECTORS(f32) STANDIN_VECTORS(f64)

namespace aule {

inline int position[3], count[3];  // of the workgroup that runs, and how many there are

template <class T, class S> T bits(S x) {
    static_assert(sizeof(T) == sizeof(S), "as many bits");
    T result;
    std::memcpy(&result, &x, sizeof(T));
    return result;
}
template <class T, class S> T convert(S x) { return __builtin_convertvector(x, T); }
template <class M, class V> V select(M mask, V yes, V no) {
    for (u32 i = 0; i < sizeof(no) / sizeof(no[0]); i++) no[i] = mask[i] ? yes[i] : no[i];
    return no;
}

template <class T, class S> T join(S low, S high) {
    T result;
    std::memcpy(&result, &low, sizeof(S)), std::memcpy((char*)&result + sizeof(S), &high, sizeof(S));
    return result;
}

// Functions of scalars, and through them of vectors.
template <class T> constexpr bool scalar = std::is_arithmetic_v<T> || std::is_same_v<T, f16>;
#define STANDIN_ONE(name, expression)                                                                        \
    template <class T> T name(T x) {                                                                         \
        if constexpr (scalar<T>) return (T)(expression);                                                     \
        else {                                                                                               \
            for (u32 i = 0; i < sizeof(x) / sizeof(x[0]); i++) x[i] = name(x[i]);                            \
            return x;                                                                                        \
        }                                                                                                    \
    }
#define STANDIN_TWO(name, expression)                                                                        \
    template <class T> T name(T a, T b) {                                                                    \
        if constexpr (scalar<T>) return (T)(expression);                                                     \
        else {                                                                                               \
            for (u32 i = 0; i < sizeof(a) / sizeof(a[0]); i++) a[i] = name(a[i], b[i]);                      \
            return a;                                                                                        \
        }                                                                                                    \
    }
template <class T> auto wide(T x) {
    if constexpr (std::is_same_v<T, f16>) return (f32)x;
    else return x;
}
STANDIN_ONE(abs, x < 0 ? -x : x == 0 ? 0 : x)
STANDIN_ONE(floor, std::floor(wide(x)))
STANDIN_ONE(sqrt, std::sqrt(wide(x)))
STANDIN_ONE(log2, std::log2(wide(x)))
STANDIN_ONE(exp2, std::exp2(wide(x)))
STANDIN_ONE(rsqrt, 1 / std::sqrt(wide(x)))
STANDIN_ONE(rcp, 1 / wide(x))
STANDIN_ONE(sin, std::sin(wide(x)))
STANDIN_ONE(cos, std::cos(wide(x)))
STANDIN_TWO(min, b < a || a != a ? b : a)
STANDIN_TWO(max, a < b || a != a ? b : a)
STANDIN_TWO(mulhi, (u64)a * b >> 32)
template <class T> T fma(T a, T b, T c) {
    if constexpr (scalar<T>) return (T)std::fma(wide(a), wide(b), wide(c));
    else {
        for (u32 i = 0; i < sizeof(a) / sizeof(a[0]); i++) a[i] = fma(a[i], b[i], c[i]);
        return a;
    }
}

inline i32 thread_id() { return shim::group.current; }
inline i32 lane_id() { return shim::group.current % shim::kSimd; }
inline i32 subgroup_id() { return shim::group.current / shim::kSimd; }
inline i32 group_id_x() { return position[0]; }
inline i32 group_id_y() { return position[1]; }
inline i32 group_id_z() { return position[2]; }
inline i32 group_count_x(u32) { return count[0]; }
inline i32 group_count_y(u32) { return count[1]; }
inline i32 group_count_z(u32) { return count[2]; }
inline void barrier() { shim::meet(shim::group.all); }
inline void barrier_global() { barrier(); }
inline void subgroup_barrier() { shim::meet(shim::group.simd[subgroup_id()]); }
inline void device_fence() {}

template <class T> T shuffle(T x, i32 lane) { return shim::from_bits<T>(shim::gather(x)[lane & (shim::kSimd - 1)]); }
template <i32 mask, class T> T shuffle_xor(T x) { return shuffle(x, lane_id() ^ mask); }
#define STANDIN_REDUCE(name, expression)                                                                     \
    template <class T> T subgroup_##name(T x) {                                                              \
        const uint64_t* all = shim::gather(x);                                                               \
        T a = shim::from_bits<T>(all[0]);                                                                    \
        for (int i = 1; i < shim::simd_members(); i++) {                                                     \
            const T b = shim::from_bits<T>(all[i]);                                                          \
            a = (T)(expression);                                                                             \
        }                                                                                                    \
        return a;                                                                                            \
    }
STANDIN_REDUCE(reduce_add, a + b)
STANDIN_REDUCE(reduce_min, min(a, b))
STANDIN_REDUCE(reduce_max, max(a, b))
STANDIN_REDUCE(any, a || b)
STANDIN_REDUCE(all, a && b)

#define STANDIN_ATOMIC(kind, expression)                                                                     \
    template <class T> T atomic_##kind##_global(T* place, T x) {                                             \
        const T old = *place;                                                                                \
        *place = expression;                                                                                 \
        return old;                                                                                          \
    }                                                                                                        \
    template <class T> T atomic_##kind##_shared(T* place, T x) { return atomic_##kind##_global(place, x); }
STANDIN_ATOMIC(add, old + x)
STANDIN_ATOMIC(exchange, x)
STANDIN_ATOMIC(min, x < old ? x : old)
STANDIN_ATOMIC(max, old < x ? x : old)
STANDIN_ATOMIC(and, old & x)
STANDIN_ATOMIC(or, old | x)
STANDIN_ATOMIC(xor, old ^ x)

AULE_DEVICE u16 round_bf16(f32 x) {  // to nearest even
    const u32 word = bits<u32>(x);
    return (u16)(x != x ? word >> 16 | 0x40 : (word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline f16x4 e4m3_halves(u32 x) {
    f16x4 found;
    for (int i = 0; i < 4; i++) {
        const u32 code = x >> 8 * i & 0xff, exponent = code >> 3 & 15, fraction = code & 7;
        const f32 size = exponent ? std::ldexp(8.0f + fraction, (int)exponent - 10) : std::ldexp((f32)fraction, -9);
        found[i] = (f16)((code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size);
    }
    return found;
}

// -- products of matrices: which lane holds what is as AMD's ISA guides say ---------------------------------------

inline f32 number(f16 x) { return x; }
inline f32 number(u16 x) { return bits<f32>((u32)x << 16); }

inline f32 dot_pairs(u32 a, u32 b, f32 c) {
    return c + number((u16)a) * number((u16)b) + number((u16)(a >> 16)) * number((u16)(b >> 16));
}

// The factors of all lanes of a subgroup, which stay where they are until all have multiplied.
template <class F> struct Factors {
    F a, b;
    const uint64_t* all;
    Factors(F left, F right) : a(left), b(right) { all = shim::gather(this); }
    ~Factors() { subgroup_barrier(); }
    const Factors& of(int lane) const { return *(const Factors*)all[lane]; }
};

// CDNA and RDNA 4: every 16 lanes hold the same number of successive columns of A and rows of B, of which `count` from
// `first` on are multiplied. Lane l holds rows `rows` * (l / 16) ... of column l % 16 of the result.
template <int rows, class F, class C> C blocked(F a, F b, C c, int first, int count) {
    const Factors<F> factors(a, b);
    const int group = lane_id() / 16, column = lane_id() % 16;
    for (int i = 0; i < rows; i++)
        for (int from = 0; from < shim::kSimd; from += 16)
            for (int k = first; k < first + count; k++)
                c[i] += number(factors.of(from + rows * group + i).a[k]) * number(factors.of(from + column).b[k]);
    return c;
}
// RDNA 3: every 16 lanes hold a copy of the factors, a row of A and a column of B each. Rows of the result alternate
// between them.
template <int rows, class F, class C> C copied(F a, F b, C c) {
    const Factors<F> factors(a, b);
    const int groups = shim::kSimd / 16, group = lane_id() / 16;
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < 16; k++)
            c[i] += number(factors.of(16 * group + groups * i + group).a[k]) * number(b[k]);
    return c;
}
inline f32x4 mfma_f32_16x16x16_f16(f16x4 a, f16x4 b, f32x4 c) { return blocked<4>(a, b, c, 0, 4); }
inline f32x4 mfma_f32_16x16x16_bf16(u16x4 a, u16x4 b, f32x4 c) { return blocked<4>(a, b, c, 0, 4); }
inline f32x4 mfma_f32_16x16x8_bf16(u16x4 a, u16x4 b, f32x4 c) { return blocked<4>(a, b, blocked<4>(a, b, c, 0, 2), 2, 2); }
inline f32x4 mfma_f32_16x16x32_f16(f16x8 a, f16x8 b, f32x4 c) { return blocked<4>(a, b, c, 0, 8); }
inline f32x4 mfma_f32_16x16x32_bf16(u16x8 a, u16x8 b, f32x4 c) { return blocked<4>(a, b, c, 0, 8); }
inline f32x8 wmma_f32_16x16x16_f16_w32_gfx12(f16x8 a, f16x8 b, f32x8 c) { return blocked<8>(a, b, c, 0, 8); }
inline f32x8 wmma_f32_16x16x16_bf16_w32_gfx12(u16x8 a, u16x8 b, f32x8 c) { return blocked<8>(a, b, c, 0, 8); }
inline f32x8 wmma_f32_16x16x16_f16_w32(f16x16 a, f16x16 b, f32x8 c) { return copied<8>(a, b, c); }
inline f32x8 wmma_f32_16x16x16_bf16_w32(u16x16 a, u16x16 b, f32x8 c) { return copied<8>(a, b, c); }
inline f32x4 wmma_f32_16x16x16_f16_w64(f16x16 a, f16x16 b, f32x4 c) { return copied<4>(a, b, c); }
inline f32x4 wmma_f32_16x16x16_bf16_w64(u16x16 a, u16x16 b, f32x4 c) { return copied<4>(a, b, c); }

}  // namespace aule

// Calls a kernel with arguments that lie where a table says, as a launch has them.
namespace standin {

template <class... A, size_t... I> void call(void (*kernel)(A...), void** table, std::index_sequence<I...>) {
    kernel(*(std::remove_const_t<A>*)table[I]...);
}
template <class... A> void call(void (*kernel)(A...), void** table) {
    call(kernel, table, std::index_sequence_for<A...>());
}

}  // namespace standin
